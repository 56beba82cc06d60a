"""Diagnostics during training: at intervals the probes read one fixed batch, and the Trainer logs what they saw."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from gated_qwen.diagnostics.decoder import decoder_body
from gated_qwen.diagnostics.diagnose import Probes, ProbeSettings
from gated_qwen.training.loss_spikes import LossSpikes

PREFIX = "diagnostics/"
INPUTS = ("input_ids", "attention_mask", "position_ids")


class DiagnosticsCallback(TrainerCallback):
    """Logs sinks, activations and gates every `every` steps through `Trainer.log`, and counts loss spikes.

    The decoder's body runs without gradients, in eval mode, in the weights' dtype and without a cache; modes, random
    state and gradients are as before, so that training is bit-equal with and without it. Every process runs it on the
    same batch, and only the main one reports, as with every log. With FSDP or DeepSpeed the whole wrapped model runs,
    on every rank, since no rank has all weights.

    Logged, with the prefix `diagnostics/`: `first_token_share`, `first_token_share_worst_layer`, `uniform`, `boost`,
    `max_activation` and `mean_of_layer_maxima` of the residual stream, `max_attention_output`, `max_ffn_output`,
    `gate_mean`, `dead_heads` and `always_open_heads` for each gate position (attention output: no suffix),
    `loss_spikes` and `seconds`.

    Args:
        batch: `input_ids` (B, T), and `attention_mask` or `position_ids` if needed; it is read as it is each time.
        every: steps of the optimizer between two diagnoses; there is one before the first step as well.
        settings: of the probes; the default leaves the shares of all keys out.
        spikes: counts spikes of the logged loss, at the Trainer's `logging_steps`.

    Raises:
        ValueError: a batch without `input_ids`, or `every` below 1.

    Example (`trainer` is any transformers Trainer):

        DiagnosticsCallback({"input_ids": batch}, every=200).attach(trainer)
        trainer.train()
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor],
        *,
        every: int = 200,
        settings: ProbeSettings | None = None,
        spikes: LossSpikes | None = None,
    ) -> None:
        if "input_ids" not in batch:
            raise ValueError(f"the batch has {', '.join(batch) or 'nothing'}; it needs input_ids")
        if every < 1:
            raise ValueError(f"every {every}: at least 1 step")
        self.batch = {name: batch[name].clone() for name in INPUTS if batch.get(name) is not None}
        self.every = every
        self.settings = settings or ProbeSettings(columns="off")
        self.spikes = spikes or LossSpikes()
        self.trainer: Any = None

    def attach(self, trainer: Any) -> "DiagnosticsCallback":
        """Adds the callback to a Trainer, which it needs for logging; returns itself."""
        self.trainer = trainer
        trainer.add_callback(self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is None:
            raise ValueError(
                "DiagnosticsCallback logs through its Trainer: use callback.attach(trainer), not callbacks="
            )
        if state.global_step % self.every == 0:
            self._diagnose(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._diagnose(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.spikes.add(float(logs["loss"]))

    def _diagnose(self, control: Any) -> None:
        should_log = control.should_log
        self.trainer.log(self._measure())
        control.should_log = should_log  # logging clears it, and the step's own loss would go unlogged

    def _measure(self) -> dict[str, float]:
        began = time.monotonic()
        trainer = self.trainer
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        forward = trainer.model_wrapped if sharded else decoder_body(trainer.model)
        inputs = {name: tensor.to(trainer.args.device) for name, tensor in self.batch.items()}
        with _undisturbed(trainer.model), torch.no_grad(), Probes(trainer.model, self.settings) as probes:
            forward(**inputs, use_cache=False)
        found = {**_scalars(probes.summary()), "loss_spikes": self.spikes.count, "seconds": time.monotonic() - began}
        return {f"{PREFIX}{name}": float(value) for name, value in found.items() if value is not None}


@contextmanager
def _undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode inside; outside each module's own mode and the random state are as before."""
    modes = {module: module.training for module in model.modules()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _scalars(sections: dict[str, Any]) -> dict[str, float | None]:
    mean, worst = sections["attention"]["mean"], sections["attention"]["worst_layer"]
    maxima = sections["activations"]["summary"]
    found = {name: mean[name] for name in ("first_token_share", "uniform", "boost")}
    found["first_token_share_worst_layer"] = worst["first_token_share"] if worst else None
    found["max_activation"] = maxima["residual"]["max_over_layers"]
    found["mean_of_layer_maxima"] = maxima["residual"]["mean_of_layer_maxima"]
    found["max_attention_output"] = maxima["attention_output"]["max_over_layers"]
    found["max_ffn_output"] = maxima["ffn_output"]["max_over_layers"]
    for position, gate in (sections["gates"] or {"summary": {}})["summary"].items():
        suffix = "" if position == "attn_output" else f"_{position}"
        found[f"gate_mean{suffix}"] = gate["mean"]
        found[f"dead_heads{suffix}"] = gate["dead_heads"]
        found[f"always_open_heads{suffix}"] = gate["always_open_heads"]
    return found

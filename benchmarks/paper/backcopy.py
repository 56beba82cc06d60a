"""The Bigram-Backcopy task (arXiv 2410.13835), on which an attention sink forms within minutes.

Every sequence begins with BOS. Each next token is drawn from the row of a fixed Markov chain that belongs to the last
token, except after one of three trigger tokens, where the token before the trigger is copied. A head that copies has
nothing to do at all other tokens, and there it parks its mass on BOS.
"""

import math
import random
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from experiments import Run
from transformers import LlamaConfig, LlamaForCausalLM

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.folder import atomic_folder
from gated_qwen.diagnostics.diagnose import Probes, ProbeSettings

BOS, VOCABULARY, TRIGGERS = 0, 65, (1, 2, 3)
DRAWN_AT_ONCE = 25  # batches
LLAMA_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "rope_parameters"),
    *("bos_token_id", "eos_token_id"),
)


@dataclass(frozen=True)
class Setting:
    """How backcopy models are made and trained; the same for all variants.

    Attributes:
        length: tokens of a sequence, BOS included.
        steps, long_steps: of most runs, and of those of `backcopy-long`.
        every: steps between two measurements; there is one before the first step as well.
        skip_queries: how many first queries the `_skipped` shares leave out: the first few see little but BOS.
        shape: config fields.
    """

    length: int = 32
    batch: int = 32
    steps: int = 1000
    long_steps: int = 2500
    warmup: int = 50
    learning_rate: float = 1e-2
    every: int = 100
    skip_queries: int = 16
    shape: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "tie_word_embeddings": False,
            "use_qk_norm": False,  # with it the scores are bounded, and the sink comes much later
        }
    )


class Backcopy:
    """The task: one Markov chain, drawn from a seed, and sequences of it.

    Args:
        length: tokens of a sequence.
        seed: of the chain. Sequences have generators of their own.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        scores = 2.0 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        scores[:, BOS] = -math.inf
        self.length, self.transitions = length, scores.softmax(dim=1)

    def sample(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """(batch, length) int64 token ids."""
        tokens = torch.full((batch, self.length), BOS)
        triggers = torch.tensor(TRIGGERS)
        for i in range(1, self.length):
            drawn = torch.multinomial(self.transitions[tokens[:, i - 1]], 1, generator=generator)[:, 0]
            copies = torch.isin(tokens[:, i - 1], triggers) & (i > 2)  # what BOS stands before is not copied
            tokens[:, i] = torch.where(copies, tokens[:, i - 2], drawn)
        return tokens

    def losses(self, logits: torch.Tensor, tokens: torch.Tensor) -> dict[str, float]:
        """Mean loss in nats at tokens drawn from the chain, less the chain's own entropy there, and at copied ones."""
        log_p = logits[:, :-1].float().log_softmax(-1)
        loss = -log_p.gather(-1, tokens[:, 1:, None])[..., 0]
        copied = torch.isin(tokens[:, :-1], torch.tensor(TRIGGERS))
        copied[:, :2] = False
        rows = self.transitions[tokens[:, :-1]]
        entropy = -(rows * rows.clamp_min(1e-30).log()).sum(-1)
        return {
            "drawn_excess": (loss - entropy)[~copied].mean().item(),
            "copied": loss[copied].mean().item(),
        }


@torch.no_grad()
def measure(model: Any, task: Backcopy, tokens: torch.Tensor, skip_queries: int) -> dict[str, Any]:
    """Losses, BOS shares, activation maxima and gates on fixed sequences, and the norm of BOS's values.

    `value_norm_ratio` is the norm of the value vector at BOS over the mean norm at other tokens, per layer, before any
    gate on the value; a drained sink has a small one.
    """
    norms: list[float] = []

    def values(module: Any, args: Any, output: torch.Tensor) -> None:
        length = output.float().norm(dim=-1)  # (B, T)
        norms.append((length[:, 0].mean() / length[:, 1:].mean()).item())

    hooks = [layer.self_attn.v_proj.register_forward_hook(values) for layer in model.model.layers]
    try:
        with Probes(model, ProbeSettings(skip_queries=skip_queries, columns="off")) as probes:
            logits = model(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    found = probes.summary()
    attention, gates = found["attention"], found["gates"]
    return {
        **task.losses(logits, tokens),
        "bos_share": [layer["first_token_share_skipped"] for layer in attention["layers"]],
        "max_activation": found["activations"]["summary"]["residual"]["max_over_layers"],
        "value_norm_ratio": norms,
        "mean_gate": None if gates is None else {place: value["mean"] for place, value in gates["summary"].items()},
    }


def train_backcopy(run: Run, out: Path, setting: Setting) -> dict[str, Any]:
    """Trains one variant, or goes on with the model of another run, measures on the way and keeps the model.

    Args:
        run: its `seed` is that of weights and sequences; the chain is always the same.
        out: with `runs`.
        setting: of all runs.

    Returns:
        The setting and `history`, a list of measurements with their `step`.
    """
    began = time.monotonic()
    torch.manual_seed(run.seed)
    random.seed(run.seed)
    model = _model(run, out, setting)
    again = 0 if run.source is None else 500  # other sequences than the source has seen
    task, generator = Backcopy(setting.length), torch.Generator().manual_seed(1000 + again + run.seed)
    fixed = task.sample(128, torch.Generator().manual_seed(99))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / setting.warmup))
    steps = setting.long_steps if run.experiment == "backcopy-long" else setting.steps
    history = [{"step": 0, **measure(model.eval(), task, fixed, setting.skip_queries)}]
    drawn: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        if not drawn:
            drawn = list(task.sample(setting.batch * DRAWN_AT_ONCE, generator).split(setting.batch))
        tokens = drawn.pop()
        model.train()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % setting.every == 0 or step == steps:
            history.append({"step": step, **measure(model.eval(), task, fixed, setting.skip_queries)})
    with atomic_folder(out / "runs" / run.name / "model") as folder:
        model.save_pretrained(folder)
    return {"setting": asdict(setting), "history": history, "seconds": time.monotonic() - began}


def _model(run: Run, out: Path, setting: Setting) -> Any:
    if run.source is None:
        config = GatedQwenConfig(
            **setting.shape,
            **run.changes,
            vocab_size=VOCABULARY,
            max_position_embeddings=setting.length,
            bos_token_id=BOS,
            attn_implementation="sdpa",
        )
        return GatedQwenForCausalLM(config)
    model = GatedQwenForCausalLM.from_pretrained(out / "runs" / run.source / "model")
    return model if run.gate is None else _with_gate(model, run.gate)


def _with_gate(model: Any, gate: str) -> Any:
    """`gated-qwen convert --gate` from the exact start; our model without gate and query/key norms is a Llama."""
    config = model.config
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in LLAMA_FIELDS}))
    llama.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        llama.save_pretrained(Path(folder, "llama"))
        convert(Path(folder, "llama"), Path(folder, "gated"), gate=gate)
        return GatedQwenForCausalLM.from_pretrained(Path(folder, "gated"))

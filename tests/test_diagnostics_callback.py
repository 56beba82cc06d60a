"""The Trainer callback: what it logs, and that training does not notice it; the loss-spike counter by hand."""

import math

import pytest
import torch
from tiny import tiny_model, tokens
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from ungated import ungated_model

from gated_qwen.training.diagnostics_callback import DiagnosticsCallback
from gated_qwen.training.loss_spikes import LossSpikes

SCALARS = {
    "first_token_share",
    "first_token_share_worst_layer",
    "uniform",
    "boost",
    "max_activation",
    "mean_of_layer_maxima",
    "max_attention_output",
    "max_ffn_output",
    "loss_spikes",
    "seconds",
}
GATE_SCALARS = {"gate_mean", "dead_heads", "always_open_heads"}


class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = tokens(1, 12, seed=index)[0]
        return {"input_ids": row, "labels": row}


class Reporter(TrainerCallback):
    """Stands for TensorBoard and the like: keeps what it is told."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append((state.global_step, dict(logs)))


def trainer_of(model, tmp_path, **arguments):
    defaults = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    fixed = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 7}
    return Trainer(model, TrainingArguments(tmp_path, **{**defaults, **fixed, **arguments}), train_dataset=Rows())


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def diagnoses(trainer):
    return [entry for entry in trainer.state.log_history if "diagnostics/boost" in entry]


def test_scalars_are_logged_to_all_that_the_trainer_reports_to(tmp_path):
    trainer = trainer_of(tiny_model().train(), tmp_path)
    reporter = Reporter()
    trainer.add_callback(reporter)
    DiagnosticsCallback({"input_ids": tokens(2, 16)}, every=2).attach(trainer)
    trainer.train()
    logged = diagnoses(trainer)
    assert [entry["step"] for entry in logged] == [0, 2, 4, 6]
    for entry in logged:
        names = {name.removeprefix("diagnostics/") for name in entry if name.startswith("diagnostics/")}
        assert names == SCALARS | GATE_SCALARS
        assert all(math.isfinite(entry[f"diagnostics/{name}"]) for name in names)
    assert entry["diagnostics/uniform"] == pytest.approx(sum(1 / n for n in range(1, 17)) / 16)
    told = [step for step, logs in reporter.told if "diagnostics/boost" in logs]
    assert told == [0, 2, 4, 6]
    assert len({entry["diagnostics/gate_mean"] for entry in logged}) == 4, "the model that trains is the one measured"


def test_a_model_without_gates_logs_the_rest(tmp_path):
    trainer = trainer_of(ungated_model("llama"), tmp_path, max_steps=1)
    DiagnosticsCallback({"input_ids": tokens(1, 16)}, every=1).attach(trainer)
    trainer.train()
    names = {name for entry in diagnoses(trainer) for name in entry if name.startswith("diagnostics/")}
    assert {name.removeprefix("diagnostics/") for name in names} == SCALARS


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True},
        {"logging_steps": 2},
    ],
    ids=str,
)
def test_losses_are_bit_equal_with_and_without_it(arguments, tmp_path):
    """Dropout makes the losses depend on the random state, which a diagnosis must not move."""
    found = []
    for watched in (False, True):
        model = tiny_model(attention_dropout=0.2).train()
        trainer = trainer_of(model, tmp_path, **arguments)
        if watched:
            DiagnosticsCallback({"input_ids": tokens(2, 16)}, every=1).attach(trainer)
        trainer.train()
        found.append((losses(trainer), [parameter.detach().clone() for parameter in model.parameters()]))
    (plain, weights), (watched, watched_weights) = found
    assert plain == watched and len(plain) == 6 // arguments.get("logging_steps", 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))


def test_modes_and_gradients_are_left_alone(tmp_path):
    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append([module.training for module in model.modules()])

    seen = []
    model = tiny_model().train()
    trainer = trainer_of(model, tmp_path, max_steps=3)
    callback = DiagnosticsCallback({"input_ids": tokens(1, 16)}, every=1).attach(trainer)
    trainer.add_callback(Look())
    trainer.train()
    assert len(seen) == 3 and all(all(modes) for modes in seen)
    model.model.layers[0].eval()
    model(tokens(1, 8), labels=tokens(1, 8)).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    callback._measure()
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.config._attn_implementation == "sdpa"


def test_padding_is_left_out(tmp_path):
    ids, mask = tokens(1, 12), torch.ones(1, 12, dtype=torch.long)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    padded_mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), mask], 1)
    trainer = trainer_of(tiny_model(), tmp_path)
    plain = DiagnosticsCallback({"input_ids": ids}).attach(trainer)._measure()
    batch = {"input_ids": padded, "attention_mask": padded_mask, "labels": padded}
    found = DiagnosticsCallback(batch).attach(trainer)._measure()
    for name in SCALARS - {"seconds"}:
        assert found[f"diagnostics/{name}"] == pytest.approx(plain[f"diagnostics/{name}"], rel=1e-5), name


def test_spikes_of_the_logged_loss_are_counted(tmp_path):
    trainer = trainer_of(tiny_model(), tmp_path)
    callback = DiagnosticsCallback({"input_ids": tokens(1, 8)}, spikes=LossSpikes(window=4, least=4)).attach(trainer)
    for loss in (2.0, 2.1, 2.0, 1.9, 9.0, 2.0):
        trainer.log({"loss": loss})
    trainer.log({"eval_loss": 99.0})
    assert callback._measure()["diagnostics/loss_spikes"] == 1


def test_wrong_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it needs input_ids"):
        DiagnosticsCallback({"labels": tokens(1, 8)})
    with pytest.raises(ValueError, match="every 0: at least 1 step"):
        DiagnosticsCallback({"input_ids": tokens(1, 8)}, every=0)
    trainer = trainer_of(tiny_model(), tmp_path)
    trainer.add_callback(DiagnosticsCallback({"input_ids": tokens(1, 8)}))
    with pytest.raises(ValueError, match=r"use callback\.attach\(trainer\)"):
        trainer.train()


def test_loss_spikes_by_hand():
    """Window 5: median 2.0; deviations 0, 0.1, 0.1, 0, 0.1, so MAD 0.1 and one deviation 0.14826."""
    limit = 2.0 + 6.0 * 1.4826 * 0.1
    for loss, is_spike in ((limit - 1e-6, False), (limit + 1e-6, True), (-5.0, False)):
        spikes = LossSpikes(window=5, deviations=6.0, least=5)
        assert not any(spikes.add(value) for value in (2.0, 2.1, 1.9, 2.0, 2.1))
        assert spikes.add(loss) == is_spike and spikes.count == is_spike


def test_the_floor_keeps_a_still_loss_from_making_spikes():
    """MAD 0: the least deviation is 1 % of the median, so the limit is 2.0 + 6 * 0.02."""
    for loss, is_spike in ((2.119, False), (2.121, True)):
        spikes = LossSpikes(window=5, deviations=6.0, floor=0.01, least=5)
        assert not any(spikes.add(2.0) for _ in range(5))
        assert spikes.add(loss) == is_spike


def test_spikes_do_not_hide_spikes_and_a_new_level_is_none():
    spikes = LossSpikes(window=10, least=5)
    found = [spikes.add(loss) for loss in [2.0, 2.1, 1.9, 2.0, 2.1, 2.0, 9.0, 2.0, 9.0, 2.1]]
    assert [index for index, spike in enumerate(found) if spike] == [6, 8]
    level = [spikes.add(5.0) for _ in range(12)]
    assert level[0] and not any(level[6:])


def test_a_loss_that_is_not_finite_is_a_spike_and_not_a_standard():
    spikes = LossSpikes(window=5, least=3)
    assert [spikes.add(loss) for loss in (float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0)] == [1, 0, 0, 0, 1, 0]
    assert list(spikes.recent) == [1.0] * 4
    with pytest.raises(ValueError, match="least 6: it must be 1 to the window of 5"):
        LossSpikes(window=5, least=6)

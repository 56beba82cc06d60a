"""Optimiser groups hold every trainable parameter once, gates apart, and a Trainer keeps their rates."""

import pytest
import torch
from peft import get_peft_model
from tiny import EVERY_POSITION, tiny_model, tokens
from transformers import Trainer, TrainingArguments

from gated_qwen.training.adapters import lora_config
from gated_qwen.training.gates import freeze_all_but_gates
from gated_qwen.training.parameter_groups import parameter_groups

MODELS = {
    "plain": {},
    "headwise": {"gate_granularity": "headwise"},
    "every position, biased": {"gate_positions": EVERY_POSITION, "gate_bias": True, "attention_bias": True},
    "constant": {"gate_input": "constant", "gate_positions": EVERY_POSITION},
    "head-shared": {"gate_head_shared": True},
    "tied": {"tie_word_embeddings": True, "sandwich_norm": True, "attn_output_norm": True},
    "no gate": {"gate_positions": []},
}


def by_name(groups):
    return {group["name"]: group for group in groups}


def names_of(model, group):
    wanted = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_trainable_parameter_is_in_one_group(name, wrapped):
    model = tiny_model(**MODELS[name])
    if wrapped:
        gate = "none" if name == "no gate" else "full"
        model = get_peft_model(model, lora_config(model, rank=4, gate=gate))
    groups = parameter_groups(model, learning_rate=1e-3, weight_decay=0.1)
    found = [id(parameter) for group in groups for parameter in group["params"]]
    expected = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert len(found) == len(set(found)) and set(found) == set(expected)


@pytest.mark.parametrize("name", MODELS)
def test_gates_are_apart_and_norms_and_biases_are_not_decayed(name):
    model = tiny_model(**MODELS[name])
    groups = by_name(
        parameter_groups(model, learning_rate=1e-3, weight_decay=0.1, gate_learning_rate=1e-2, gate_weight_decay=0.02)
    )
    for group_name, group in groups.items():
        members = names_of(model, group)
        assert all((".g_proj" in member) == group_name.startswith("gate") for member in members)
        assert group["lr"] == (1e-2 if group_name.startswith("gate") else 1e-3)
    undecayed = {
        member for group in groups.values() if group["weight_decay"] == 0 for member in names_of(model, group)
    }
    constant = name == "constant"  # the scores of a constant gate are all that it has
    assert undecayed == {
        member
        for member, _ in model.named_parameters()
        if "norm" in member or (member.endswith(".bias") and not (constant and ".g_proj" in member))
    }
    if name == "no gate":
        assert list(groups) == ["weights", "norms and biases"]
    else:
        assert groups["gates"]["weight_decay"] == 0.02


def test_adapters_on_a_gate_and_copies_of_it_take_the_gates_rate():
    for gate in ("lora", "full"):
        model = tiny_model()
        model = get_peft_model(model, lora_config(model, rank=4, gate=gate))
        groups = by_name(parameter_groups(model, learning_rate=1e-3, gate_learning_rate=1e-2))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert names_of(model, groups["gates"]) == {name for name in trained if ".g_proj." in name} != set()


def test_a_negative_rate_and_a_frozen_model_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="learning rate -1.0 is negative"):
        parameter_groups(model, learning_rate=1e-3, gate_learning_rate=-1.0)
    with pytest.raises(ValueError, match="no parameter of the model is trainable"):
        parameter_groups(model.requires_grad_(False), learning_rate=1e-3)


def test_a_trainer_trains_gates_at_their_own_rate(tmp_path):
    model = tiny_model()
    frozen_rate = parameter_groups(model, learning_rate=0.0, gate_learning_rate=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments = TrainingArguments(tmp_path, max_steps=2, report_to=[], save_strategy="no", use_cpu=True)
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 9)]
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(torch.optim.AdamW(frozen_rate), None))
    trainer.train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if ".g_proj." in name}
    assert len(trainer.lr_scheduler.get_last_lr()) == len(frozen_rate)


def test_gates_alone_learn_after_freezing_the_rest():
    model = tiny_model(gate_positions=EVERY_POSITION)
    assert len(freeze_all_but_gates(model)) == 10
    assert list(by_name(parameter_groups(model, learning_rate=1e-3))) == ["gates"]

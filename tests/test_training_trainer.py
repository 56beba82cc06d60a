"""What our Trainer adds to transformers': router losses that accumulate, and a loss in chunks that keeps the rest."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import gates, tiny_model, tiny_moe_model, tokens
from training_corpus import evaluated, losses, recipe_in
from transformers import TrainingArguments

from gated_qwen.training.chunked_loss import check_chunked_loss, loss_in_chunks
from gated_qwen.training.recipe import GateSection, LossSection
from gated_qwen.training.run import train
from gated_qwen.training.trainer import GatedTrainer

ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.25}


def losses_and_gradients(model, ids, chunk):
    model.zero_grad()
    if chunk:
        with loss_in_chunks(model, chunk):
            output = model(input_ids=ids, labels=ids, use_cache=False)
    else:
        output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def lora(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["g_proj", "lm_head"], init_lora_weights=False))


@pytest.mark.parametrize("kind", ["experts", "LoRA on gate and head"])
def test_the_loss_in_chunks_keeps_router_losses_and_adapters(kind):
    model = tiny_moe_model(**ROUTER) if kind == "experts" else lora(tiny_model())
    ids = tokens(2, 9)
    whole, expected = losses_and_gradients(model, ids, None)
    chunked, found = losses_and_gradients(model, ids, 4)
    torch.testing.assert_close(chunked.loss, whole.loss, atol=1e-5, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4, msg=name)
    if kind == "experts":
        assert whole.aux_loss > 0 and whole.z_loss > 0
        torch.testing.assert_close(chunked.z_loss, whole.z_loss)


def test_dropout_does_not_hinder_the_loss_in_chunks_and_is_left_on():
    model = tiny_model(attention_dropout=0.5).train()
    state = torch.get_rng_state()
    check_chunked_loss(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)


def first_gradient(folder, batch_size, accumulation, router):
    model = tiny_moe_model(**{**ROUTER, **router})
    row = tokens(1, 12)[0].tolist()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row}] * 4  # equal rows: the means over one are the means over all
    trainer = GatedTrainer(gate=GateSection(), loss=LossSection(), model=model, args=arguments, train_dataset=rows)
    trainer.train()
    assert (model.router_aux_loss_coef, model.config.router_z_loss_coef) == tuple({**ROUTER, **router}.values())[1:]
    return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]


def test_router_losses_do_not_grow_with_accumulation(tmp_path):
    whole = first_gradient(tmp_path, 4, 1, {})
    assert first_gradient(tmp_path, 1, 4, {}) == pytest.approx(whole, rel=1e-4)
    without = first_gradient(tmp_path, 4, 1, {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0})
    assert whole[0] > without[0] + 0.1  # they are not nothing


def test_a_mixture_trains_with_diagnostics_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_in(
        tmp_path,
        model__preset="tiny-moe-headwise",
        data__evaluation=evaluated(tmp_path),
        diagnostics={"every": 3},
        loss={"chunk": 9},
        trainer__report_to="tensorboard",
        trainer__eval_strategy="steps",
        trainer__eval_steps=4,
        trainer__gradient_accumulation_steps=2,
    )
    result = train(recipe, tmp_path / "out")
    assert losses(tmp_path / "out")[8] < losses(tmp_path / "out")[1] - 0.3
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "diagnostics/gate_mean" in entry] == [0, 3, 6]
    (folder,) = {file.parent for file in (tmp_path / "out").rglob("events.out.tfevents*")}
    reader = EventAccumulator(str(folder)).Reload()
    assert {"train/loss", "eval/loss"} <= set(reader.Tags()["scalars"])
    shares = [tag for tag in reader.Tags()["scalars"] if "diagnostics/first_token_share" in tag]
    assert [event.step for event in reader.Scalars(shares[0])] == [0, 3, 6]
    assert result.evaluation_loss is not None


@pytest.mark.parametrize("tied", [True, False])
def test_training_the_gates_alone_leaves_a_tied_head_alone(tmp_path, tied):
    recipe = recipe_in(
        tmp_path,
        gate={"train_only": True, "learning_rate": 1e-2},
        loss={"chunk": 9},
        model__set={"tie_word_embeddings": tied},
        trainer__gradient_checkpointing=True,
        trainer__max_steps=2,
    )
    from safetensors.torch import load_file

    result = train(recipe, tmp_path / "out")
    folders = (tmp_path / "out" / "checkpoints" / "checkpoint-2", result.model)
    last, model = (load_file(folder / "model.safetensors") for folder in folders)
    assert ("lm_head.weight" in model) != tied
    assert all(torch.equal(last[name], tensor) for name, tensor in model.items())
    from transformers import AutoTokenizer

    from gated_qwen.training.model import build_model

    start = build_model(recipe, AutoTokenizer.from_pretrained(result.model), seed=42)
    moved = {name for name, tensor in model.items() if not torch.equal(tensor, start.state_dict()[name])}
    assert moved == {f"{name}.weight" for name in gates(start)}

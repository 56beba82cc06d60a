"""Two processes train what one does: data parallel through the command's own path, sharded through FSDP2."""

import json
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file
from tiny import gates, tiny_model, tokens
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from training_corpus import losses, recipe_in
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers_suite.distributed import start_rank_processes

from gated_qwen.training.chunked_loss import loss_in_chunks
from gated_qwen.training.recipe import SHIPPED, GateSection, LossSection
from gated_qwen.training.run import train
from gated_qwen.training.trainer import GatedTrainer

STEPS = {"trainer__max_steps": 4, "trainer__save_strategy": "no", "trainer__logging_steps": 1}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def as_rank(rank, port):
    """Sets this forked process up as one of two, as a launcher does."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    torch.set_num_threads(1)


def train_as_rank(rank, port, folder, changes):
    as_rank(rank, port)
    result = train(recipe_in(folder, **changes), folder / "two")
    assert result.speaks == (rank == 0)
    assert result.tokens == 4 * 4 * 32


PARALLEL = {
    "the model's own loss": {},
    "the loss in chunks": {"loss": {"chunk": 7}},
    "a streamed text": {"data__train__0__streaming": True},
    "experts": {"model__preset": "tiny-moe-headwise", "model__set": {"router_aux_loss_coef": 0.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PARALLEL)
def test_two_processes_have_the_losses_of_one(tmp_path, case):
    train(recipe_in(tmp_path, **STEPS, **PARALLEL[case]), tmp_path / "one")
    changes = {**STEPS, **PARALLEL[case], "trainer__per_device_train_batch_size": 2}
    start_rank_processes(train_as_rank, (free_port(), tmp_path, changes), 2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    expected, found = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("one", "two"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=0.0, msg=name)


def steps_of(model, batch, chunk, average=lambda loss: loss):
    """Three steps of AdamW; returns their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        if chunk:
            with loss_in_chunks(model, chunk):
                loss = model(batch, labels=batch, use_cache=False).loss
        else:
            loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(average(loss.detach()).item())
    return found


def shard_as_rank(rank, port, folder, expected, chunk):
    as_rank(rank, port)
    dist.init_process_group("gloo")
    try:
        model = tiny_model(gate_granularity="headwise")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        gate = next(iter(gates(model).values()))
        assert gate.weight.to_local().numel() * 2 == gate.weight.numel()  # each rank holds half

        def average(loss):
            dist.all_reduce(loss, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            return loss / 2

        batch = tokens(4, 12, seed=3).chunk(2)[rank]
        assert steps_of(model, batch, chunk, average) == pytest.approx(expected, abs=1e-4)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_sharded_model_trains_as_a_whole_one_and_its_checkpoint_loads_in_one_process(tmp_path, chunk):
    whole = tiny_model(gate_granularity="headwise")
    expected = steps_of(whole, tokens(4, 12, seed=3), chunk)
    start_rank_processes(shard_as_rank, (free_port(), tmp_path / "sharded", expected, chunk), 2)
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) == 2  # one file a rank
    loaded = tiny_model(gate_granularity="headwise")
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "sharded", no_dist=True)
    loaded.load_state_dict(state)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=1e-4, rtol=0.0, msg=name)


def train_split(rank, port, folder, world):
    """Four steps of the Trainer; with two ranks each holds half of the heads, their gates and the FFN."""
    options = {}
    if world > 1:
        as_rank(rank, port)
        options["distributed_config"] = DistributedConfig(tp_size=world, tp_plan="auto")
    rows = [{"input_ids": row, "labels": row} for row in tokens(32, 12, seed=5).tolist()]
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=4,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        save_strategy="no",  # the Trainer keeps no optimizer of a model that is split when it is loaded
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **options)
    if world > 1:
        assert model.model.layers[0].self_attn.g_proj.weight.to_local().shape[0] == 2  # of 4 heads
    gate = GateSection(learning_rate=2e-2)
    trainer = GatedTrainer(gate=gate, loss=LossSection(), model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder / f"trained-{world}"))
    if rank == 0:
        (folder / f"{world}.json").write_text(json.dumps(trainer.state.log_history))


@pytest.mark.slow
def test_a_model_split_by_its_tensor_parallel_plan_trains_as_a_whole_one(tmp_path, monkeypatch):
    # accelerate allows a split on accelerators only; nothing else hinders it here.
    monkeypatch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)
    tiny_model(gate_granularity="headwise").save_pretrained(tmp_path / "model")
    for world in (1, 2):
        start_rank_processes(train_split, (free_port(), tmp_path, world), world)
    logs = [json.loads((tmp_path / f"{world}.json").read_text()) for world in (1, 2)]
    for name in ("loss", "grad_norm"):
        expected, found = ([entry[name] for entry in log if name in entry] for log in logs)
        assert found == pytest.approx(expected, abs=1e-4)
    expected, found = (load_file(tmp_path / f"trained-{world}" / "model.safetensors") for world in (1, 2))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=0.0, msg=name)


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed-zero3"])
def test_the_shipped_launch_configs_are_read_by_accelerate(name):
    config = load_config_from_file(str(SHIPPED.parent / "launch" / f"{name}.yaml"))
    assert config.num_processes == 8


def test_sharding_that_would_not_happen_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.fsdp: .*on the CPU"):
        train(recipe_in(tmp_path, trainer__fsdp=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""The shipped DeepSpeed config, run: ZeRO-3 trains our models on two processes as one process does."""

import json
import os
import shutil

import pytest
import torch
from accelerate import state as accelerate_state
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from safetensors.torch import load_file
from test_training_parallel import as_rank, free_port
from training_corpus import logged, losses, recipe_in
from transformers_suite.distributed import start_rank_processes

from gated_qwen.training.recipe import SHIPPED
from gated_qwen.training.run import train

pytestmark = pytest.mark.slow
CONFIG = SHIPPED.parent / "launch" / "deepspeed-zero3.yaml"
STEPS = {"trainer__max_steps": 4, "trainer__save_steps": 2, "trainer__logging_steps": 1}
CASES = {
    "dense": {},
    "gate group, diagnostics": {
        "gate": {"learning_rate": 2e-2},
        "diagnostics": {"every": 2, "sequences": 2},
        "trainer__gradient_checkpointing": True,
    },
    "experts": {"model__preset": "tiny-moe-headwise", "model__set": {"router_aux_loss_coef": 0.0}},
}


@pytest.fixture(autouse=True)
def deepspeed():
    """Not a dependency; on a CPU it compiles a part of itself at its first use, which takes a minute."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed")


def environment():
    """What `accelerate launch --config_file deepspeed-zero3.yaml` tells its processes."""
    words = ["--config_file", str(CONFIG), "--mixed_precision", "no", "-m", "gated_qwen.cli"]
    options, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    options.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, found = prepare_deepspeed_cmd_env(options)
    return {name: value for name, value in found.items() if name.startswith("ACCELERATE_")}


def train_sharded(rank, port, folder, changes, resume):
    as_rank(rank, port)
    os.environ.update(environment())
    # accelerate takes DeepSpeed for accelerators only, when it chooses backend and device; the rest works here.
    processes = accelerate_state.PartialState
    processes._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
    processes.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    train(recipe_in(folder, **changes), folder / "two", resume=resume)


def train_on_two(folder, changes, resume=False):
    changes = {**changes, "trainer__per_device_train_batch_size": 2, "trainer__use_cpu": False}
    start_rank_processes(train_sharded, (free_port(), folder, changes, resume), 2)
    return load_file(folder / "two" / "model" / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_zero_3_is_a_whole_one_and_goes_on(tmp_path, case):
    model = {name: value for name, value in CASES[case].items() if name.startswith("model")}
    base = train(recipe_in(tmp_path, trainer__max_steps=1, **model), tmp_path / "base").model  # ZeRO-3 draws others
    changes = {**STEPS, **CASES[case], "model": {"source": str(base)}, "tokenizer": {"source": str(base)}}
    changes = {name: value for name, value in changes.items() if not name.startswith("model__")}
    train(recipe_in(tmp_path, **changes), tmp_path / "one")
    found = train_on_two(tmp_path, changes)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    expected = load_file(tmp_path / "one" / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=0.0, msg=name)
    folders = [tmp_path / run / "model" for run in ("one", "two")]
    assert len({frozenset(path.name for path in folder.iterdir()) for folder in folders}) == 1
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert configs[0] == configs[1]
    if "diagnostics" in changes:
        assert logged(tmp_path / "two", "diagnostics/gate_mean").keys() == {0, 2, 4}

    shutil.rmtree(tmp_path / "two" / "model")
    with pytest.raises(AssertionError, match="checkpoint-4: the run has ended"):
        train_on_two(tmp_path, changes, resume=True)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "checkpoint-4")
    again = train_on_two(tmp_path, changes, resume=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def test_the_loss_in_chunks_is_refused(tmp_path):
    recipe_in(tmp_path)
    with pytest.raises(AssertionError, match=r"ValueError: loss\.chunk: ZeRO-3 .*FSDP2"):
        train_on_two(tmp_path, {**STEPS, "loss": {"chunk": 7}})

"""The shipped FSDP2 config, run: accelerate shards our models on two processes through the command's own path."""

import json
import os
import shutil

import pytest
import torch
from accelerate import state as accelerate_state
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from test_training_parallel import as_rank, free_port
from training_corpus import evaluated, logged, losses, recipe_in
from transformers import AutoModelForCausalLM
from transformers_suite.distributed import start_rank_processes

from gated_qwen.training.recipe import SHIPPED
from gated_qwen.training.run import train

CONFIG = SHIPPED.parent / "launch" / "fsdp2.yaml"
STEPS = {"trainer__max_steps": 4, "trainer__save_steps": 2, "trainer__logging_steps": 1}
CASES = {
    "dense": {},
    "chunks, gate group, diagnostics, evaluation": {
        "loss": {"chunk": 7},
        "gate": {"learning_rate": 2e-2},
        "diagnostics": {"every": 2, "sequences": 2},
        "trainer__gradient_checkpointing": True,
    },
    "experts": {"model__preset": "tiny-moe-headwise", "model__set": {"router_aux_loss_coef": 0.0}},
}


def environment(layer):
    """What `accelerate launch --config_file fsdp2.yaml` tells its processes about sharding."""
    words = ["--config_file", str(CONFIG), "--mixed_precision", "no", "-m", "gated_qwen.cli"]
    options, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    found = prepare_multi_gpu_env(options)
    found = {name: value for name, value in found.items() if name.startswith(("FSDP_", "ACCELERATE_"))}
    return {**found, "FSDP_TRANSFORMER_CLS_TO_WRAP": layer or found["FSDP_TRANSFORMER_CLS_TO_WRAP"]}


def shard_on_the_cpu():
    """accelerate takes FSDP for accelerators only when it chooses the kind of run; all that follows works on a CPU."""
    original = accelerate_state.AcceleratorState.__init__

    def with_plugin(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
        if plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    accelerate_state.AcceleratorState.__init__ = with_plugin


def train_sharded(rank, port, folder, changes, resume):
    as_rank(rank, port)
    os.environ.update(environment("GatedQwenMoeDecoderLayer" if "model__preset" in changes else None))
    shard_on_the_cpu()
    train(recipe_in(folder, **changes), folder / "two", resume=resume)


def train_on_two(folder, changes, resume=False):
    changes = {**changes, "trainer__per_device_train_batch_size": 2}
    start_rank_processes(train_sharded, (free_port(), folder, changes, resume), 2)
    return load_file(folder / "two" / "model" / "model.safetensors")


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0.0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_sharded_run_is_a_whole_one_and_goes_on_from_its_shards(tmp_path, case):
    changes = {**STEPS, **CASES[case]}
    if "diagnostics" in changes:
        recipe_in(tmp_path)
        changes |= {"data__evaluation": evaluated(tmp_path)}
    train(recipe_in(tmp_path, **changes), tmp_path / "one")
    expected, found = load_file(tmp_path / "one" / "model" / "model.safetensors"), train_on_two(tmp_path, changes)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert_close(found, expected, 1e-4)
    evaluation = logged(tmp_path / "two", "eval_loss")

    folders = [tmp_path / run / "model" for run in ("one", "two")]
    assert len({frozenset(path.name for path in folder.iterdir()) for folder in folders}) == 1
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert configs[0] == configs[1], "the class that FSDP2 makes is not named"
    AutoModelForCausalLM.from_pretrained(folders[1], trust_remote_code=True)

    shards = tmp_path / "two" / "checkpoints" / "checkpoint-4" / "pytorch_model_fsdp_0"
    assert sorted(path.name for path in shards.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    shutil.rmtree(tmp_path / "two" / "model")  # killed before it was written: there is no step left to take
    assert_close(train_on_two(tmp_path, changes, resume=True), found, 0.0)
    for path in (shards.parent, tmp_path / "two" / "model"):
        shutil.rmtree(path)
    assert_close(train_on_two(tmp_path, changes, resume=True), found, 1e-6)
    if "diagnostics" in changes:
        assert logged(tmp_path / "two", "eval_loss") == pytest.approx(evaluation, abs=1e-6)
        assert logged(tmp_path / "two", "diagnostics/gate_mean").keys() == {0, 2, 4}


def launch_with_the_config(rank, port, folder):
    as_rank(rank, port)
    os.environ.update(environment(None))
    train(recipe_in(folder, **STEPS), folder / "two")


def test_a_config_that_would_copy_instead_of_shard_is_refused(tmp_path):
    recipe_in(tmp_path)
    with pytest.raises(AssertionError, match=r"ValueError: .*it would copy the model"):
        start_rank_processes(launch_with_the_config, (free_port(), tmp_path), 2)
    assert not (tmp_path / "two" / "model").exists()

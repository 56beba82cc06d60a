"""The published plans split the model: every part holds whole heads with their gates, and the parts add up."""

import os
import re
import traceback
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny import EVERY_POSITION, TINY_EXPERTS, tiny_config, tiny_model, tiny_moe_config, tiny_moe_model, tokens
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import gated_qwen  # noqa: F401  (registers the Auto classes in the ranks too)
from gated_qwen.modeling_gated_qwen import GatedQwenAttention

PER_HEAD = ["query", "key", "value", "attn_output"]
VARIANTS = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "every head": {"gate_positions": PER_HEAD, "gate_bias": True, "attention_bias": True, "attn_output_norm": True},
    "every head, headwise": {"gate_positions": PER_HEAD, "gate_granularity": "headwise", "gate_input_channels": 5},
    "constant": {"gate_positions": PER_HEAD, "gate_input": "constant"},
    "constant headwise": {"gate_input": "constant", "gate_granularity": "headwise"},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True},
    "head-shared": {"gate_positions": PER_HEAD, "gate_head_shared": True},
    "head-shared headwise": {"gate_granularity": "headwise", "gate_head_shared": True},
    "no gate": {"gate_positions": [], "attn_output_activation": "silu"},
    "sandwich norm, tied": {"sandwich_norm": True, "tie_word_embeddings": True},
}
# Layer 0 has experts, layer 1 an FFN, so that each pipeline stage is of another kind.
EXPERTS = {**TINY_EXPERTS, "num_hidden_layers": 2, "num_experts": 6}
MOE_VARIANTS = {
    "experts": EXPERTS,
    "experts, headwise": {**EXPERTS, "gate_granularity": "headwise"},
    "experts, every position": {**EXPERTS, "gate_positions": EVERY_POSITION, "norm_topk_prob": False},
}
VARIANTS |= MOE_VARIANTS
SHARED = [name for name in VARIANTS if name.startswith("head-shared")]
# Parts add up before the gate on the dense output acts.
SPLIT_BY_HEAD = [name for name in VARIANTS if name not in (*SHARED, *MOE_VARIANTS, "every position")]
OF_KEY_VALUE_HEADS = ("k_proj", "v_proj", "g_proj_key", "g_proj_value")


def config_of(variant):
    return (tiny_moe_config if variant in MOE_VARIANTS else tiny_config)(**VARIANTS[variant])


def model_of(variant):
    return (tiny_moe_model if variant in MOE_VARIANTS else tiny_model)(**VARIANTS[variant])


def style_of(plan, module_name):
    return next((style for rule, style in plan.items() if fnmatch(module_name, rule)), None)


def part_of(tensor, name, style, part, parts, heads, kv_heads):
    """The rows or columns of `tensor` that part number `part` holds; key/value heads repeat beyond their number."""
    if style == "rowwise":
        return tensor if name.endswith("bias") else tensor.chunk(parts, dim=1)[part]
    if style != "colwise":
        return tensor
    if name.rsplit(".", 1)[0] in OF_KEY_VALUE_HEADS and parts > kv_heads:
        part, parts = part * kv_heads // parts, kv_heads
    return tensor.chunk(parts, dim=0)[part]


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("variant", SPLIT_BY_HEAD)
def test_parts_hold_whole_heads_and_add_up(variant, parts):
    fields = VARIANTS[variant]
    model = tiny_model(**fields)
    plan, heads, kv_heads = model.config.base_model_tp_plan, 4, 2
    own_heads, own_kv_heads = heads // parts, max(1, kv_heads // parts)
    local_config = tiny_config(**fields, num_attention_heads=own_heads, num_key_value_heads=own_kv_heads)
    local_config._attn_implementation = "sdpa"

    hidden_states = torch.randn(2, 9, 32)
    position_embeddings = model.model.rotary_emb(hidden_states, torch.arange(9)[None])
    for index, layer in enumerate(model.model.layers):
        whole = layer.self_attn
        total = 0
        for part in range(parts):
            state = {}
            for name, tensor in whole.state_dict().items():
                style = style_of(plan, f"layers.{index}.self_attn.{name.rsplit('.', 1)[0]}")
                own = part_of(tensor, name, style, part, parts, heads, kv_heads)
                if re.match("[qkvg]_proj", name):
                    count = kv_heads if name.rsplit(".", 1)[0] in OF_KEY_VALUE_HEADS else heads
                    own_count = own_kv_heads if count == kv_heads else own_heads
                    first = part * count // parts
                    by_head = tensor.view(count, -1, *tensor.shape[1:])[first : first + own_count]
                    assert torch.equal(own, by_head.flatten(0, 1)), name
                if name == "o_proj.bias" and part > 0:
                    own = torch.zeros_like(own)  # added once, after the sum
                state[name] = own
            local = GatedQwenAttention(local_config, index)
            local.load_state_dict(state)
            total = total + local(hidden_states, position_embeddings)[0]
        expected = whole(hidden_states, position_embeddings)[0]
        torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plan_names_only_what_the_model_has(variant):
    model = model_of(variant).model
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    assert [rule for rule in model.config.base_model_tp_plan if not any(fnmatch(name, rule) for name in names)] == []


def test_gates_of_heads_are_split_and_all_others_are_replicated():
    for variant in VARIANTS:
        config = config_of(variant)
        shared = config.gate_head_shared
        for position in config.gate_positions:
            module = "g_proj" if position == "attn_output" else f"g_proj_{position.removesuffix('_output')}"
            split = position != "dense_output" and not shared
            style = style_of(config.base_model_tp_plan, f"layers.1.self_attn.{module}")
            assert style == ("colwise" if split else None), (variant, position)


def test_a_changed_plan_stays_with_its_config():
    tiny_config(gate_head_shared=True)
    assert tiny_config().base_model_tp_plan["layers.*.self_attn.g_proj"] == "colwise"


@pytest.mark.parametrize("variant", MOE_VARIANTS)
def test_the_expert_plan_splits_all_experts_and_nothing_else(variant):
    config = config_of(variant)
    assert {rule.split(".", 3)[-1] for rule in config.base_model_ep_plan} == {
        "experts",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    for module in ("self_attn.g_proj", "mlp.gate"):
        assert style_of(config.base_model_ep_plan, f"layers.0.{module}") is None
    assert style_of(config.base_model_tp_plan, "layers.0.mlp.gate") is None  # each rank routes every token


def test_the_pipeline_plan_covers_every_stage():
    model = tiny_model().model
    stages = [name for name, _ in model.named_children() if name != "rotary_emb"]
    assert list(model.config.base_model_pp_plan) == stages == ["embed_tokens", "layers", "norm"]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def split_run(folder):
    """What one rank finds with the model of `folder` split over two ranks."""
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    ids = tokens(2, 9)
    with torch.no_grad():
        logits = model(ids).logits
    parts = {
        name: parameter.detach().to_local()
        for name, parameter in model.named_parameters()
        if ".g_proj" in name and hasattr(parameter, "to_local")
    }
    found = {"logits": logits, "gates": parts}
    try:
        model(ids, labels=ids).loss.backward()
    except NotImplementedError as error:
        return {**found, "refused": str(error)}
    return {**found, "gradients": {name: whole(parameter.grad) for name, parameter in model.named_parameters()}}


def staged_run(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(pp_size=2))
    with torch.no_grad():
        return {"logits": model(tokens(2, 9)).logits, "layers": [type(layer).__name__ for layer in model.model.layers]}


def experts_run(folder):
    """What one rank finds with the experts of `folder` spread over two ranks."""
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, ep_size=2))
    ids = tokens(2, 9)
    output = model(ids, labels=ids)
    output.loss.backward()
    own = model.model.layers[0].mlp.experts.gate_up_proj
    return {
        "logits": output.logits.detach(),
        "experts": (own.to_local() if hasattr(own, "to_local") else own).shape[0],
        "gradients": {
            name: whole(parameter.grad)
            for name, parameter in model.named_parameters()
            if ".g_proj" in name or name.endswith("mlp.gate.weight")
        },
    }


def rank_main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {}
    for number, variant in enumerate(VARIANTS):
        runs = {"split": split_run, "staged": staged_run}
        if variant in MOE_VARIANTS:
            runs["experts"] = experts_run
        for kind, run in runs.items():
            try:
                found[kind, variant] = run(Path(folder, str(number)))
            except Exception:
                found[kind, variant] = traceback.format_exc()
            dist.barrier()
    torch.save(found, Path(folder, f"rank{rank}"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Per rank, what it found for every variant; one pair of processes runs them all."""
    folder = tmp_path_factory.mktemp("ranks")
    for number, variant in enumerate(VARIANTS):
        model_of(variant).save_pretrained(folder / str(number))
    mp.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}") for rank in range(2)]


def results(two_ranks, kind, variant):
    found = [rank[kind, variant] for rank in two_ranks]
    for result in found:
        assert not isinstance(result, str), result
    return found


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_tensor_parallel_processes_give_the_logits_of_one(two_ranks, variant):
    model = model_of(variant)
    expected = model(tokens(2, 9)).logits
    parameters = dict(model.named_parameters())
    for rank, found in enumerate(results(two_ranks, "split", variant)):
        torch.testing.assert_close(found["logits"], expected, atol=1e-5, rtol=1e-5)
        for name, part in found["gates"].items():
            count = 2 if "_key" in name or "_value" in name else 4
            by_head = parameters[name].view(count, -1, *parameters[name].shape[1:])
            assert torch.equal(part, by_head.chunk(2)[rank].flatten(0, 1)), name


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in SHARED])
def test_two_tensor_parallel_processes_give_the_gradients_of_one(two_ranks, variant):
    model = model_of(variant)
    model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    for found in results(two_ranks, "split", variant):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                found["gradients"][name], parameter.grad, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("variant", SHARED)
def test_training_a_shared_gate_on_two_processes_is_refused(two_ranks, variant):
    for found in results(two_ranks, "split", variant):  # each rank would see the gradient of its own heads alone
        assert "head-shared" in found["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_pipeline_stages_give_the_logits_of_one_process(two_ranks, variant):
    model = model_of(variant)
    expected = model(tokens(2, 9)).logits
    found = results(two_ranks, "staged", variant)
    for result in found:
        torch.testing.assert_close(result["logits"], expected, atol=1e-6, rtol=0)
    layer_class = type(model.model.layers[0]).__name__
    ours = [[name == layer_class for name in result["layers"]] for result in found]
    assert ours == [[True, False], [False, True]]


@pytest.mark.slow
@pytest.mark.parametrize("variant", MOE_VARIANTS)
def test_two_expert_parallel_processes_give_logits_and_gradients_of_one(two_ranks, variant):
    model = model_of(variant)
    output = model(tokens(2, 9), labels=tokens(2, 9))
    output.loss.backward()
    parameters = dict(model.named_parameters())
    for found in results(two_ranks, "experts", variant):
        assert found["experts"] == 3  # of six
        torch.testing.assert_close(found["logits"], output.logits, atol=1e-5, rtol=1e-5)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, parameters[name].grad, atol=1e-5, rtol=1e-4)

"""The router probe counts what the routers of a mixture of experts choose."""

import copy
import json
import math

import pytest
import torch
import transformers
from gated_models import EXPERTS, LINEAR_ATTENTION
from probe_models import probe_model
from tiny import CACHE, TINY_FIELDS, randomize, tokens

from gated_qwen import GatedQwenMoeConfig
from gated_qwen.diagnostics.router_probe import RouterProbe
from gated_qwen.diagnostics.router_statistics import RouterStatistics

FULL = {"layer_types": ["full_attention"] * 2, **LINEAR_ATTENTION}
MIXTURES = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, {}),
    "qwen3_next": (transformers.Qwen3NextConfig, FULL),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, FULL),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
    "gpt_oss": (transformers.GptOssConfig, {"num_local_experts": 4, "pad_token_id": 0}),
    "gated_qwen_moe": (GatedQwenMoeConfig, {}),
}


def mixture(name):
    config_class, extra = MIXTURES[name]
    experts = {} if "num_local_experts" in extra else EXPERTS
    fields = {**TINY_FIELDS, **experts, "num_experts_per_tok": 2, **extra}
    config = config_class(**copy.deepcopy(fields))  # some write into the RoPE parameters that they are given
    return randomize(transformers.AutoModelForCausalLM.from_config(config)).eval()


def probed(model, *calls, **fields):
    with RouterProbe(model) as probe, torch.no_grad():
        for call in calls or [fields]:
            model(**call)
    return probe


@pytest.mark.parametrize("name", MIXTURES)
def test_load_and_entropy_are_those_of_the_logits(name):
    model, seen = mixture(name), {}
    probe = RouterProbe(model)
    assert list(probe.routers) == [0, 1]
    for layer, router in probe.routers.items():
        router.register_forward_hook(lambda module, args, output, layer=layer: seen.__setitem__(layer, output))
    with probe, torch.no_grad():
        model(tokens(2, 9))
    summary = probe.statistics.summary()
    assert summary["tokens"] == 18
    for row in summary["layers"]:
        logits, _, chosen = seen[row["layer"]]
        probabilities = logits.double().softmax(-1)
        assert (row["experts"], row["experts_per_token"]) == (4, 2)
        assert row["load"] == pytest.approx([(chosen == e).double().mean().item() for e in range(4)])
        assert torch.equal(probabilities.topk(2).indices.sort().values, chosen.sort().values)
        assert row["probability"] == pytest.approx(probabilities.mean(0).tolist(), abs=1e-6)
        entropy = -(probabilities * probabilities.log()).sum(-1).mean().item() / math.log(4)
        assert row["entropy"] == pytest.approx(entropy, abs=1e-6)
        assert row["max_load"] == pytest.approx(4 * max(row["load"]))


def test_an_expert_that_is_never_chosen_is_named_and_a_uniform_router_has_full_entropy():
    model = mixture("qwen3_moe")
    first, second = RouterProbe(model).routers.values()
    with torch.no_grad():
        first.weight.zero_()
        second.weight.zero_()
        second.weight[:2, 0] = torch.tensor([50.0, -50.0])  # one of experts 0 and 1 is all but certain
    rows = probed(model, input_ids=tokens(4, 30)).statistics.summary()["layers"]
    assert rows[0]["entropy"] == pytest.approx(1.0)
    assert rows[0]["balance"] == pytest.approx(1.0)
    assert len(rows[0]["unused"]) == 2 and rows[0]["max_load"] == pytest.approx(2.0)  # ties always go to the same two
    assert rows[1]["entropy"] < 0.5


def test_padding_is_not_routed():
    model, ids = mixture("gated_qwen_moe"), tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    real = torch.tensor([[0] * 4 + [1] * 6])
    alone = probed(model, input_ids=ids).statistics.summary()
    together = probed(model, input_ids=padded, attention_mask=real).statistics.summary()
    assert together["tokens"] == 6
    for found, wanted in zip(together["layers"], alone["layers"], strict=True):
        assert found["load"] == wanted["load"]
        assert found["entropy"] == pytest.approx(wanted["entropy"], abs=1e-5)


def test_chunks_and_merged_halves_equal_one_pass():
    model, ids = mixture("gated_qwen_moe"), tokens(2, 9)
    whole = probed(model, input_ids=ids).statistics.summary()
    cache = None
    with RouterProbe(model) as chunked, torch.no_grad():
        for first, last in ((0, 4), (4, 9)):
            cache = model(**{"input_ids": ids[:, first:last], CACHE: cache}, use_cache=True).past_key_values
    halves = [probed(model, input_ids=half).statistics for half in ids.split(1)]
    merged = RouterStatistics.from_dict(json.loads(json.dumps(halves[0].to_dict(), allow_nan=False)))
    merged.merge(halves[1])
    for summary in (chunked.statistics.summary(), merged.summary()):
        assert summary["tokens"] == 18
        for found, wanted in zip(summary["layers"], whole["layers"], strict=True):
            assert found["load"] == wanted["load"]
            assert found["probability"] == pytest.approx(wanted["probability"], abs=1e-6)
    json.dumps(whole, allow_nan=False)


def test_only_layers_with_experts_are_reported():
    config = transformers.Qwen3MoeConfig(**copy.deepcopy(TINY_FIELDS), **EXPERTS, mlp_only_layers=[0])
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    assert [row["layer"] for row in probed(model, input_ids=tokens(1, 5)).statistics.summary()["layers"]] == [1]


@pytest.mark.parametrize("name", ["llama", "elementwise", "gpt2"])
def test_a_model_without_experts_reports_none(name):
    assert probed(probe_model(name), input_ids=tokens(1, 5)).statistics.summary() is None


def test_logits_are_untouched_and_no_hook_stays():
    model, ids = mixture("gated_qwen_moe"), tokens(2, 9)
    with torch.no_grad():
        plain = model(ids).logits
        with RouterProbe(model) as probe:
            assert torch.equal(model(ids).logits, plain)
        with pytest.raises(IndexError), probe:
            model(torch.tensor([[64]]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

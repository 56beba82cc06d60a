"""A watched model computes what it computed before, in inference and training, and nothing is left behind."""

import pytest
import torch
from probe_models import PROBE_MODELS, probe_model
from probe_runs import IDS, LEFT, SETTINGS, assert_close_tree, assert_equal_statistics, probed
from tiny import tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, FalconConfig, FalconForCausalLM

from gated_qwen.diagnostics.attention_probe import AttentionProbe

FULL_ATTENTION = [
    name for name in PROBE_MODELS if name not in ("mistral sliding", "gemma2 soft-capped", "gpt_oss sinks")
]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_the_output_is_that_of_the_models_own_attention(name, attention):
    model = probe_model(name, attention=attention)
    with torch.no_grad():
        own = model(IDS, attention_mask=LEFT).logits
        with AttentionProbe(model):
            watched = model(IDS, attention_mask=LEFT).logits
    real = LEFT.bool() if attention == "eager" else slice(None)  # eager and SDPA differ on padding itself
    torch.testing.assert_close(watched[real], own[real], atol=0 if attention == "sdpa" else 5e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2 soft-capped", "gpt_oss sinks", "elementwise"])
def test_gradients_of_a_training_step_are_those_without_the_probe(name):
    # SDPA leaves out what it cannot do: soft-capping, in transformers up to 5.20
    model = probe_model(name, attention="eager" if name.startswith("gemma2") else None)
    gradients = []
    for settings in (None, SETTINGS):
        model.zero_grad()
        if settings is None:
            model(IDS, labels=IDS).loss.backward()
        else:
            with AttentionProbe(model, **settings):
                model(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_no_query_twice(reentrant):
    model = probe_model("qwen3").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with AttentionProbe(model, **SETTINGS) as probe:
        model(IDS, labels=IDS).loss.backward()
    assert probe.statistics.summary()["queries"] == IDS.numel()
    assert_equal_statistics(probe.statistics, probed(probe_model("qwen3")))


def test_dropout_in_training_leaves_the_shares_alone():
    model = probe_model("gpt2").train()
    for layer in model.transformer.h:  # no other dropout, which would change the input of the next layer
        layer.attn.attn_dropout.p, layer.attn.resid_dropout.p, layer.mlp.dropout.p = 0.5, 0.0, 0.0
    model.transformer.drop.p = 0.0
    first = probed(model).summary()["layers"][0]
    assert_close_tree(first, probed(model.eval()).summary()["layers"][0])


def test_autocast_is_kept():
    model = probe_model("qwen3")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own = model(IDS).logits
        with AttentionProbe(model) as probe:
            watched = model(IDS).logits
    assert torch.equal(watched, own)
    share = probe.statistics.summary()["mean"]["first_token_share"]
    assert share == pytest.approx(probed(model).summary()["mean"]["first_token_share"], rel=0.02)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return output


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "elementwise"])
def test_no_tensor_of_all_queries_by_all_keys_is_made(name):
    model = probe_model(name)
    ids = tokens(1, 512)
    with torch.no_grad(), AttentionProbe(model), LargestTensor() as largest:
        model(ids, use_cache=False)
    assert 28 * 4 * 512 <= largest.elements < 512 * 512  # 28 sampled rows of all heads


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


def assert_untouched(model, attention):
    assert model.config._attn_implementation == attention
    names = {*AttentionInterface._global_mapping, *AttentionMaskInterface._global_mapping}
    assert not [name for name in names if "gated_qwen" in name]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_implementation_is_restored(attention):
    model = probe_model("elementwise", attention=attention)
    probed(model)
    assert_untouched(model, attention)


@pytest.mark.parametrize("where", ["in the model", "in a callback", "beside the model"])
def test_the_attention_implementation_is_restored_after_an_exception(where):
    model = probe_model("qwen3")
    with pytest.raises(Interrupted), torch.no_grad(), AttentionProbe(model) as probe:
        if where == "in the model":
            hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        elif where == "in a callback":
            probe.on_share.append(interrupt)
        else:
            interrupt()
        try:
            model(IDS)
        finally:
            if where == "in the model":
                hook.remove()
    assert_untouched(model, "sdpa")
    assert_equal_statistics(probed(model), probed(probe_model("qwen3")))


def test_a_probe_that_cannot_begin_leaves_nothing(monkeypatch):
    model = probe_model("qwen3")
    monkeypatch.setattr(AttentionMaskInterface, "register", interrupt)
    with pytest.raises(Interrupted), AttentionProbe(model):
        pass
    monkeypatch.undo()
    assert_untouched(model, "sdpa")


def test_an_abandoned_generator_restores_the_model():
    model = probe_model("qwen3")

    def chunks():
        with AttentionProbe(model):
            yield model(IDS)
            yield model(IDS)

    running = chunks()
    next(running)
    running.close()
    assert_untouched(model, "sdpa")


@pytest.mark.parametrize("first_out", [0, 1], ids=["outer first", "inner first"])
def test_two_probes_on_a_model_leave_in_any_order(first_out):
    model = probe_model("qwen3", attention="eager")
    probes = [AttentionProbe(model, **SETTINGS), AttentionProbe(model, skip_queries=3)]
    for probe in probes:
        probe.__enter__()
    with torch.no_grad():
        model(IDS)
        probes[first_out].__exit__(None, None, None)
        model(IDS)
        probes[1 - first_out].__exit__(None, None, None)
    assert_untouched(model, "eager")
    queries = [probe.statistics.summary()["queries"] for probe in probes]
    assert queries[first_out] == IDS.numel() and queries[1 - first_out] == 2 * IDS.numel()


def test_probes_on_two_models_do_not_meet():
    ungated, gated = probe_model("qwen3"), probe_model("elementwise")
    with torch.no_grad(), AttentionProbe(ungated, **SETTINGS) as a, AttentionProbe(gated, **SETTINGS) as b:
        ungated(IDS)
        gated(IDS)
        ungated(IDS)
    assert b.statistics.summary()["queries"] == IDS.numel() == a.statistics.summary()["queries"] // 2
    assert_equal_statistics(b.statistics, probed(gated))


def test_a_base_model_can_be_probed():
    model = probe_model("elementwise")
    assert_equal_statistics(probed(model.model), probed(model))


def test_a_model_whose_attention_cannot_be_seen_says_so():
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=False)
    model = FalconForCausalLM(config).eval()
    with pytest.raises(RuntimeError, match="FalconForCausalLM ran, but no attention layer of it was seen"):
        probed(model)

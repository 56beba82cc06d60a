"""The mixture of experts: Qwen3-MoE and nothing else without a gate, the equations with one, and its router losses."""

import re

import pytest
import reference_moe
import torch
from safetensors import safe_open
from test_reference import VARIANTS as GATES
from tiny import CACHE, EVERY_POSITION, TINY_EXPERTS, TINY_FIELDS, gates, tiny_moe_config, tiny_moe_model, tokens
from transformers import AutoModel, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

import gated_qwen
from gated_qwen import GatedQwenMoeConfig, GatedQwenMoeForCausalLM, modeling_gated_qwen_moe
from gated_qwen.modeling_gated_qwen_moe import router_gives_probabilities, router_z_loss

EXPERTS = {
    "a dense layer": {},
    "every layer": {"mlp_only_layers": []},
    "every second layer": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    "probabilities as they are": {"norm_topk_prob": False},
    "one expert a token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 5},
}
LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.05}
HALF_PADDED = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])


# Without a gate.


def qwen3_moe(**fields):
    """Qwen3-MoE with random weights."""
    return tiny_moe_model(Qwen3MoeForCausalLM, **fields)


@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS.keys())
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_gate_it_is_qwen3_moe_to_the_bit(dtype, attention, experts):
    fields = {"output_router_logits": True, "attn_implementation": attention, **experts}
    theirs = qwen3_moe(**fields).to(dtype)
    ours = tiny_moe_model(gate_positions=[], **fields).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    ids = tokens(2, 9)
    outputs = [model(ids, attention_mask=HALF_PADDED, labels=ids) for model in (theirs, ours)]
    for name in ("logits", "loss", "aux_loss"):
        assert torch.equal(outputs[0][name], outputs[1][name]), name
    for one, other in zip(outputs[0].router_logits, outputs[1].router_logits, strict=True):
        assert torch.equal(one, other)
    assert type(outputs[1]) is type(outputs[0])
    for output in outputs:
        output.loss.backward()
    for (name, one), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("window", [None, 4])
def test_without_a_gate_every_window_is_that_of_qwen3_moe(window):
    fields = {"use_sliding_window": window is not None, "sliding_window": window}
    theirs, ours = qwen3_moe(**fields), tiny_moe_model(gate_positions=[], **fields)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(theirs(tokens(2, 9)).logits, ours(tokens(2, 9)).logits)
    new = [
        model.generate(tokens(1, 9), max_new_tokens=12, do_sample=False, pad_token_id=0) for model in (theirs, ours)
    ]
    assert torch.equal(*new)


def test_its_defaults_are_those_of_qwen3_moe():
    ours, theirs = GatedQwenMoeConfig(gate_positions=[]).to_dict(), Qwen3MoeConfig().to_dict()
    del theirs["model_type"], theirs["rope_parameters"]
    assert {name: ours[name] for name in theirs} == theirs
    assert ours["head_dim"] == 2048 // 32  # what Qwen3-MoE's attention makes of a missing head_dim


# With a gate: the equations.


@pytest.mark.parametrize("fields", GATES.values(), ids=GATES.keys())
def test_every_gate_equals_the_float64_reference(fields):
    model = tiny_moe_model(seed=1, **fields)
    ids = tokens(1, 7)
    expected, _ = reference_moe.run(ids[0], model.state_dict(), model.config)
    with torch.no_grad():
        actual = model(ids).logits[0].double()
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS.keys())
def test_logits_and_losses_equal_the_float64_reference(experts):
    model = tiny_moe_model(seed=1, gate_granularity="headwise", **LOSSES, **experts)
    ids = tokens(1, 9)
    logits, router_logits = reference_moe.run(ids[0], model.state_dict(), model.config)
    aux, z = reference_moe.load_balancing_loss(router_logits, model.config), reference_moe.z_loss(router_logits)
    loss = reference_moe.cross_entropy(logits, ids[0]).item()
    output = model(ids, labels=ids)
    assert (output.logits[0].double() - logits).abs().max() < 1e-5 * logits.abs().max()
    assert output.aux_loss.item() == pytest.approx(aux, rel=1e-5)
    assert output.z_loss.item() == pytest.approx(z, rel=1e-5)
    assert output.loss.item() == pytest.approx(loss + 0.1 * aux + 0.05 * z, rel=1e-5)


# The router losses.


def test_the_load_balancing_loss_is_the_librarys():
    model = tiny_moe_model(**LOSSES)
    output = model(tokens(2, 9), attention_mask=HALF_PADDED)
    expected = modeling_qwen3_moe.load_balancing_loss_func(output.router_logits, 5, 2, HALF_PADDED)
    assert torch.equal(output.aux_loss, expected)


def test_padding_does_not_count_in_any_loss():
    model = tiny_moe_model(**LOSSES)
    ids = tokens(2, 9)
    whole, padded = model(ids[:1]), model(ids[1:, 4:])
    both = model(ids, attention_mask=HALF_PADDED)
    mean = (9 * whole.z_loss + 5 * padded.z_loss) / 14  # over the tokens of both rows
    torch.testing.assert_close(both.z_loss, mean, atol=1e-5, rtol=1e-5)
    labels = ids.clone()
    labels[1, :5] = -100  # the first token after the padding is predicted by padding
    other = ids.clone()
    other[1, :4] = 7
    outputs = [model(row, attention_mask=HALF_PADDED, labels=labels) for row in (ids, other)]
    for name in ("loss", "aux_loss", "z_loss"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name], atol=1e-6, rtol=1e-6)


def test_the_z_loss_is_off_unless_asked_for():
    plain = tiny_moe_model(output_router_logits=True)
    output = plain(tokens(2, 9), labels=tokens(2, 9))
    assert "z_loss" not in output and plain.config.router_z_loss_coef == 0.0
    for options in ({}, {"labels": tokens(2, 9)}):
        assert "aux_loss" not in tiny_moe_model()(tokens(2, 9), **options)


def test_the_output_as_a_tuple_begins_with_the_whole_loss():
    model = tiny_moe_model(**LOSSES)
    ids = tokens(2, 9)
    output = model(ids, labels=ids)
    as_tuple = model(ids, labels=ids, return_dict=False)
    assert torch.equal(as_tuple[0], output.loss) and torch.equal(as_tuple[-1], output.z_loss)
    assert torch.equal(model(ids, None, None, labels=ids).loss, output.loss)  # arguments by position


def test_a_call_may_leave_the_router_losses_out():
    model = tiny_moe_model(**LOSSES)
    ids = tokens(2, 9)
    output = model(ids, labels=ids, output_router_logits=False)
    assert "aux_loss" not in output and "z_loss" not in output
    expected = tiny_moe_model()(ids, labels=ids).loss
    assert torch.equal(output.loss, expected)


def test_decoding_by_hand_with_a_mask_of_all_tokens_needs_no_router_losses():
    model = tiny_moe_model(**LOSSES)
    ids = tokens(2, 9)
    cache = model(ids[:, :8], use_cache=True)[CACHE]
    step = model(ids[:, 8:], attention_mask=torch.ones(2, 9), **{CACHE: cache})
    assert "aux_loss" not in step
    torch.testing.assert_close(step.logits[:, 0], model(ids).logits[:, 8], atol=1e-5, rtol=1e-5)
    assert "aux_loss" in model(ids, use_cache=True), "the first call has no cache yet"


def test_z_loss_lowers_large_router_logits():
    logits = (torch.full((4, 3), 10.0, requires_grad=True),)
    loss = router_z_loss(logits)
    assert loss.item() == pytest.approx((10 + torch.log(torch.tensor(3.0)).item()) ** 2)
    loss.backward()
    assert (logits[0].grad > 0).all()


def test_the_z_loss_is_refused_where_the_router_hides_its_logits(monkeypatch):
    class Router(torch.nn.Module):  # as in transformers 5.0
        def __init__(self, config):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))

        def forward(self, hidden_states):
            return (hidden_states @ self.weight.T).softmax(-1), None, None

    assert not router_gives_probabilities()
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeTopKRouter", Router)
    assert router_gives_probabilities()
    monkeypatch.setattr(modeling_gated_qwen_moe, "HAS_ROUTER_LOGITS", False)
    with pytest.raises(RuntimeError, match=r"router_z_loss_coef=0\.0 or upgrade transformers"):
        GatedQwenMoeForCausalLM(tiny_moe_config(**LOSSES))


# Experts.


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_every_implementation_of_the_experts_agrees(implementation, granularity):
    model = tiny_moe_model(gate_granularity=granularity)
    gradients = []
    for name in ("eager", implementation):
        model.set_experts_implementation(name)
        assert model.config._experts_implementation == name
        model.zero_grad()
        output = model(tokens(2, 9), labels=tokens(2, 9))
        output.loss.backward()
        gradients.append([output.logits, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_experts_implementation_can_be_chosen_at_load_time(tmp_path):
    tiny_moe_model().save_pretrained(tmp_path)
    loaded = GatedQwenMoeForCausalLM.from_pretrained(tmp_path, experts_implementation="batched_mm")
    assert loaded.config._experts_implementation == "batched_mm"


@pytest.mark.parametrize("gate", [{"gate_positions": EVERY_POSITION}, {"gate_granularity": "headwise"}], ids=str)
def test_router_experts_and_gates_all_learn(gate):
    model = tiny_moe_model(**gate, **LOSSES)
    model.train()
    model(tokens(4, 9), labels=tokens(4, 9)).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad.abs().max() > 1e-6]
    assert trained == [name for name, _ in model.named_parameters()]
    assert any(name.endswith("mlp.gate.weight") for name in trained) and any(".g_proj" in name for name in trained)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert (parameter.grad.flatten(1).abs().amax(1) > 0).all(), f"an expert of {name} was never chosen"


def test_the_router_learns_from_its_losses_alone():
    model = tiny_moe_model(**LOSSES)
    output = model(tokens(2, 9))
    (output.aux_loss + output.z_loss).backward()
    routers = [parameter for name, parameter in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(router.grad.abs().max() > 0 for router in routers)


def test_the_gate_of_the_heads_and_the_router_have_names_of_their_own():
    model = tiny_moe_model()
    assert len(gates(model)) == 3
    suffixes = [name.rsplit(".", 1)[-1] for name, _ in model.named_modules()]
    assert suffixes.count("g_proj") == 3 and suffixes.count("gate") == 2


# Checkpoints.


def expert_rows(folder):
    """The tensors of a checkpoint that belong to experts, by name."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if ".experts." in name}  # noqa: SIM118


CLASSES = [getattr(gated_qwen, name) for name in gated_qwen.__all__ if re.fullmatch("GatedQwenMoe(For.*|Model)", name)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_original_checkpoint_loads_with_its_experts(cls, tmp_path):
    original = qwen3_moe()
    original.save_pretrained(tmp_path)
    assert len(expert_rows(tmp_path)) == 2 * 5 * 3, "a checkpoint of Qwen3-MoE stores every expert by itself"
    assert len(CLASSES) == 5
    for options in ({}, {"config": tiny_moe_config(vocab_size=64)}):
        model, loading = cls.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert not loading["mismatched_keys"]
        assert all(".g_proj" in name or not name.startswith("model.") for name in loading["missing_keys"])
        body = model.model if cls.__name__ != "GatedQwenMoeModel" else model
        for name, expected in original.model.state_dict().items():
            assert torch.equal(body.state_dict()[name], expected), name
        assert model.config.model_type == "gated_qwen_moe"


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_an_original_checkpoint_loads_through_the_auto_classes(auto_class, tmp_path):
    original = qwen3_moe()
    original.save_pretrained(tmp_path)
    model = auto_class.from_pretrained(tmp_path, config=tiny_moe_config(gate_positions=[]))
    assert type(model).__name__.startswith("GatedQwenMoe")
    theirs, ours = (getattr(m, "model", m).state_dict() for m in (original, model))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_saved_model_stores_every_expert_by_itself_and_loads_bit_equal(tmp_path):
    model = tiny_moe_model(gate_positions=["value", "attn_output"], dtype="bfloat16")
    model.save_pretrained(tmp_path)
    rows = expert_rows(tmp_path)
    whole = model.model.layers[2].mlp.experts
    assert torch.equal(rows["model.layers.2.mlp.experts.3.gate_proj.weight"], whole.gate_up_proj[3, :16])
    assert torch.equal(rows["model.layers.2.mlp.experts.3.up_proj.weight"], whole.gate_up_proj[3, 16:])
    assert torch.equal(rows["model.layers.2.mlp.experts.3.down_proj.weight"], whole.down_proj[3])
    loaded = GatedQwenMoeForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_new_models_draw_router_experts_and_gates_as_the_config_says():
    torch.manual_seed(0)
    fields = {**TINY_FIELDS, **TINY_EXPERTS, "hidden_size": 64, "moe_intermediate_size": 64}
    config = GatedQwenMoeConfig(**fields, initializer_range=0.1, gate_initializer_range=0.5)
    model = GatedQwenMoeForCausalLM(config)
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    for parameter, std in (
        (mlp.gate.weight, 0.1),
        (mlp.experts.gate_up_proj, 0.1),
        (mlp.experts.down_proj, 0.1),
        (attention.q_proj.weight, 0.1),
        (attention.g_proj.weight, 0.5),
    ):
        assert parameter.std().item() == pytest.approx(std, rel=0.15)


# The config.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts": "5"}, "GatedQwenMoeConfig: .*num_experts"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads=0"),
        ({"use_sliding_window": True, "sliding_window": -4}, "sliding_window=-4"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6 is not allowed; there are num_experts=5"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size=-1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers="),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] is not allowed; expected a list of 0 to 2"),
        ({"router_z_loss_coef": -0.1, "output_router_logits": True}, "router_z_loss_coef=-0.1"),
        ({"router_z_loss_coef": 0.1}, "router_z_loss_coef=0.1 .*output_router_logits=True; set both"),
        ({"output_router_logits": True, "mlp_only_layers": [0, 1, 2]}, "no layer has a router"),
        ({"num_local_experts": 4}, "num_local_experts=4 is not allowed; num_experts=5 contradicts it"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types=.*sliding_window=None"),
        ({"gate_granularity": "rowwise"}, "GatedQwenMoeConfig: gate_granularity='rowwise'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "GatedQwenMoeConfig: rope_parameters"),
        ({"gate_position": ["value"]}, "GatedQwenMoeConfig: gate_position="),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_value_without_a_meaning_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_moe_config(**fields)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names(name):
    config = GatedQwenMoeConfig(num_experts_per_tok=2, **{name: 6})
    assert (config.num_experts, config.num_local_experts) == (6, 6)
    config.num_experts = 4
    written = config.to_dict()
    assert (written["num_experts"], written["num_local_experts"]) == (4, 4)
    again = GatedQwenMoeConfig.from_dict(written)
    assert again.num_experts == 4 and again.to_dict() == written


def test_sparse_layers_are_those_whose_mlp_has_experts():
    for fields in EXPERTS.values():
        model = tiny_moe_model(**fields)
        found = [index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
        assert model.config.sparse_layers == found


def test_layer_types_follow_from_the_window():
    assert tiny_moe_config().layer_types == ["full_attention"] * 3
    sliding = tiny_moe_config(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention"] * 3)
    assert sliding.layer_types == ["sliding_attention"] * 3

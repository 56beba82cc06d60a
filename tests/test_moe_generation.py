"""The mixture of experts in use: caches, padding, packing, checkpointing, compilation and accumulation."""

import copy

import pytest
import torch
from tiny import CACHE, EVERY_POSITION, gates, tiny_moe_model, tokens
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    Trainer,
    TrainingArguments,
)

NEW_TOKENS = 16
LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.05}
SHALLOW = {"num_hidden_layers": 2, "mlp_only_layers": [1]}  # a layer of either kind, since compiling takes long
VARIANTS = {
    "elementwise": {},
    "headwise, router losses": {"gate_granularity": "headwise", **LOSSES},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 4},
}
FIRST, SECOND = tokens(2, 4, seed=1), tokens(2, 6, seed=2)
PACKED = torch.cat([FIRST, SECOND], dim=1)
POSITIONS = torch.tensor([[*range(4), *range(6)]])


def generate(model, prompt, **options):
    options.setdefault("attention_mask", torch.ones_like(prompt))
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cached_tokens_equal_uncached(cache, variant):
    model = tiny_moe_model(**VARIANTS[variant])
    cached = generate(model, tokens(2, 9), cache_implementation=cache)
    assert torch.equal(cached, generate(model, tokens(2, 9), use_cache=False))
    assert cached[:, 9:].unique().numel() > 4, "a repeated token would prove nothing about the cache"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=16)])
def test_steps_through_a_cache_give_the_logits_of_one_run(kind, variant):
    model = tiny_moe_model(**VARIANTS[variant])
    options = {"output_router_logits": False}
    cache = kind(config=model.config)
    with torch.no_grad():
        whole = model(tokens(2, 9), use_cache=False, **options).logits
        steps = tokens(2, 9).split([5, 1, 1, 2], dim=1)
        logits = [model(step, **{CACHE: cache}, use_cache=True, **options).logits for step in steps]
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_lookup_gives_the_plain_tokens(variant):
    model = tiny_moe_model(**VARIANTS[variant])
    prompt = tokens(1, 9).repeat(1, 2)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3), generate(model, prompt))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padded_prompts_generate_as_alone(attention, variant):
    model = tiny_moe_model(**VARIANTS[variant], attn_implementation=attention)
    short, long = tokens(1, 3, seed=1), tokens(1, 9, seed=2)
    ids, mask = torch.zeros(2, 2, 9, dtype=torch.long)
    ids[0, 6:], ids[1], mask[0, 6:], mask[1] = short, long, 1, 1
    batched = generate(model, ids, attention_mask=mask)[:, 9:]
    alone = [generate(model, prompt)[:, prompt.shape[1] :] for prompt in (short, long)]
    assert torch.equal(batched, torch.cat(alone))


def test_continuous_batching_gives_the_tokens_of_generate():
    model = tiny_moe_model()
    prompts = [tokens(1, length, seed=length) for length in (3, 9, 5)]
    alone = [generate(model, prompt)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    answers = model.generate_batch(
        [prompt[0].tolist() for prompt in prompts],
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64),
    )
    answers = [answers[key].generated_tokens for key in sorted(answers, key=lambda key: int(key.split("_")[-1]))]
    assert answers == alone


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_backends_equal_eager(attention, variant):
    model = tiny_moe_model(**VARIANTS[variant], attn_implementation="eager")
    mask = torch.tensor([[0] * 6 + [1] * 3, [1] * 9])
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = model(tokens(2, 9), attention_mask=mask).logits[mask.bool()]
        model.set_attn_implementation(attention)
        found = model(tokens(2, 9), attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_equal_their_stand_alone_runs_or_their_leak_is_announced(attention):
    model = tiny_moe_model(attn_implementation=attention)
    logits = model(PACKED, position_ids=POSITIONS.expand(2, -1)).logits
    torch.testing.assert_close(logits[:, :4], model(FIRST).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[:, 4:], model(SECOND).logits, atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="GatedQwenMoeModel: position_ids restart"):
        model(PACKED, position_ids=POSITIONS.expand(2, -1), use_cache=True)


def test_attentions_router_logits_and_hidden_states_are_those_of_every_layer():
    model = tiny_moe_model(attn_implementation="eager")
    options = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": True}
    output = model(tokens(2, 9), **options)
    assert [weights.shape for weights in output.attentions] == [(2, 4, 9, 9)] * 3
    assert len(output.hidden_states) == 4
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert [logits.shape for logits in output.router_logits] == [(18, 5)] * 2  # two of three layers are sparse
    expected = model.model.layers[0].mlp.gate.weight
    hidden = model.model.layers[0].post_attention_layernorm(torch.randn(3, 32))
    torch.testing.assert_close(model.model.layers[0].mlp.gate(hidden)[0], hidden @ expected.T)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("trained", ["everything", "gate only"])
def test_checkpointing_keeps_loss_and_gradients(trained, reentrant):
    plain = tiny_moe_model(**({} if reentrant else LOSSES))
    if trained == "gate only":
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(".g_proj" in name)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        checkpointed.enable_input_require_grads()
    losses, gradients = [], []
    for model in (plain, checkpointed):
        model.train()
        loss = model(PACKED, labels=PACKED).loss
        loss.backward()
        losses.append(loss)
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    torch.testing.assert_close(*losses)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_router_losses_without_a_gradient_are_announced(reentrant, recwarn):
    model = tiny_moe_model(**LOSSES).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    output = model(PACKED)
    assert output.z_loss.requires_grad is not reentrant
    announced = [str(warning.message) for warning in recwarn if "use_reentrant" in str(warning.message)]
    assert len(announced) == reentrant and all("GatedQwenMoeForCausalLM" in message for message in announced)


class UnevenLabels(torch.utils.data.Dataset):
    """Eight samples of 12 tokens, of which between 1 and 11 count."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = tokens(1, 12, seed=index)[0]
        labels = ids.clone()
        labels[: 12 - [1, 11, 3, 7, 2, 9, 5, 4][index]] = -100
        return {"input_ids": ids, "labels": labels}


def first_loss(model, batch_size, accumulation, folder):
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=UnevenLabels())
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def test_accumulation_does_not_change_the_loss_of_the_language_model(tmp_path):
    one, four = (first_loss(tiny_moe_model(), *cut, tmp_path) for cut in ((8, 1), (2, 4)))
    assert four == pytest.approx(one, abs=1e-4)


def test_the_z_loss_is_added_to_every_part_of_a_batch_as_the_load_balancing_loss_is(tmp_path):
    """transformers adds router losses whole to each part, so they weigh as often as a batch has parts."""
    ids = torch.stack([sample["input_ids"] for sample in UnevenLabels()])
    z_loss = tiny_moe_model(**LOSSES)(ids).z_loss.item()  # the mean over parts of equal size, however they are drawn
    for cut, parts in (((8, 1), 1), ((2, 4), 4)):
        without = first_loss(tiny_moe_model(**{**LOSSES, "router_z_loss_coef": 0.0}), *cut, tmp_path)
        assert first_loss(tiny_moe_model(**LOSSES), *cut, tmp_path) - without == pytest.approx(
            0.05 * z_loss * parts, abs=1e-4
        )


@pytest.mark.slow
def test_prefill_and_decode_compile_without_a_graph_break():
    model = tiny_moe_model(gate_granularity="headwise", **SHALLOW)
    ids = tokens(1, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=16)
        steps = ids.split([9, 1, 1, 1], dim=1)
        logits = [compiled(step, **{CACHE: cache}, use_cache=True).logits for step in steps]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_training_step_with_router_losses_compiles_without_a_graph_break():
    model = tiny_moe_model(**LOSSES, **SHALLOW)
    ids = tokens(2, 9)
    expected = model(ids, labels=ids).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert all(module.weight.grad.abs().max() > 0 for module in gates(model).values())

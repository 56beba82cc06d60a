"""Generation gives the same tokens whatever holds the keys and values, and however the prompts are batched."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import CACHE, EVERY_POSITION, gates, tiny_model, tokens
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
)

NEW_TOKENS = 20
VARIANTS = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}
# transformers keeps no quantised cache for sliding layers.
FULL_ATTENTION = [name for name in VARIANTS if name != "sliding"]
# Four bits hold both numbers of a group of two exactly, so the stored keys and values lose nothing.
LOSSLESS = {"backend": "quanto", "nbits": 4, "q_group_size": 2, "residual_length": 4}


def generate(model, prompt, **options):
    options.setdefault("attention_mask", torch.ones_like(prompt))
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **options)


def forward_lengths(model):
    """A list that gets the number of tokens of every forward of `model` from now on."""
    lengths = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return lengths


@pytest.fixture
def quanto_in_python(monkeypatch):
    """Unpacks four-bit numbers in Python in place of quanto's C++, which would be compiled for a minute."""
    from optimum.quanto.library.extensions.cpp import ext

    unpacking = SimpleNamespace(unpack=lambda packed, bits: torch.cat([packed & 15, packed >> 4]))
    monkeypatch.setattr(ext, "_lib", unpacking)


@pytest.fixture
def streams(monkeypatch):
    """Without a GPU there are no streams to overlap copies on: every copy is done when the call returns."""
    if torch.cuda.is_available():
        return

    class Stream:
        def wait_stream(self, other):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())


@pytest.mark.parametrize(
    "cache, variant",
    [(cache, variant) for cache in ("dynamic", "static", "offloaded", "offloaded_static") for variant in VARIANTS]
    + [("quantized", variant) for variant in FULL_ATTENTION],
)
def test_cached_tokens_equal_uncached(cache, variant, quanto_in_python, streams):
    model = tiny_model(**VARIANTS[variant])
    model.to("cuda" if cache.startswith("offloaded") and torch.cuda.is_available() else "cpu")
    prompt = tokens(2, 9).to(model.device)
    cache_config = LOSSLESS if cache == "quantized" else None
    lengths = forward_lengths(model)
    cached = generate(model, prompt, cache_implementation=cache, cache_config=cache_config)
    assert lengths == [9] + [1] * (NEW_TOKENS - 1)
    assert torch.equal(cached, generate(model, prompt, use_cache=False))


EMPTY_CACHES = {
    "dynamic": lambda config: DynamicCache(),
    "dynamic of the config": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
    "quantized": lambda config: QuantizedCache(config=config, **LOSSLESS),
}


@pytest.mark.parametrize(
    "kind, variant",
    [(kind, variant) for kind in EMPTY_CACHES for variant in VARIANTS if (kind, variant) != ("quantized", "sliding")],
)
def test_an_empty_cache_object_is_filled_and_used(kind, variant, quanto_in_python):
    model = tiny_model(**VARIANTS[variant])
    cache = EMPTY_CACHES[kind](model.config)
    ids = tokens(2, 12)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        steps = [ids[:, :5], *ids[:, 5:].split(1, dim=1)]  # a prefill, then token by token
        logits = [model(step, **{CACHE: cache}, use_cache=True).logits for step in steps]
    assert cache.get_seq_length() == 12
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_lookup_gives_the_plain_tokens(variant):
    model = tiny_model(**VARIANTS[variant])
    prompt = tokens(1, 9).repeat(1, 2)  # says everything twice, so that there is something to look up
    plain = generate(model, prompt)
    lengths = forward_lengths(model)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3), plain)
    assert max(lengths[1:]) > 1  # several tokens were proposed at once


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_assistant_model_gives_the_plain_tokens(variant):
    model = tiny_model(**VARIANTS[variant])
    assistant = copy.deepcopy(model)  # near enough to be right at times, and wrong at others
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    prompt = tokens(1, 9)
    plain = generate(model, prompt)
    lengths = forward_lengths(model)
    assert torch.equal(generate(model, prompt, assistant_model=assistant), plain)
    assert len(lengths) < NEW_TOKENS  # some proposals were taken
    assert sum(lengths) > 9 + NEW_TOKENS  # and some were not


def left_padded(*prompts):
    length = max(prompt.shape[1] for prompt in prompts)
    ids, mask = torch.zeros(2, len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, length - prompt.shape[1] :] = prompt
        mask[row, length - prompt.shape[1] :] = 1
    return ids, mask


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_prompts_generate_as_alone(variant, attention, cache):
    model = tiny_model(**VARIANTS[variant], attn_implementation=attention)
    short, long = tokens(1, 3, seed=1), tokens(1, 9, seed=2)
    ids, mask = left_padded(short, long)
    batched = generate(model, ids, attention_mask=mask, cache_implementation=cache)[:, 9:]
    alone = [generate(model, prompt)[:, prompt.shape[1] :] for prompt in (short, long)]
    assert torch.equal(batched, torch.cat(alone))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_batch_of_one_generates_as_unpadded(variant, attention):
    model = tiny_model(**VARIANTS[variant], attn_implementation=attention)
    prompt = tokens(1, 3)
    ids, mask = left_padded(prompt, tokens(1, 9))
    padded = generate(model, ids[:1], attention_mask=mask[:1])
    assert torch.equal(padded[:, 9:], generate(model, prompt)[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_module_is_finite_on_pad_rows(attention, dtype):
    model = tiny_model(**VARIANTS["every position"], attn_implementation=attention).to(dtype)
    seen = set()

    def check(name):
        def hook(module, args, output):
            outputs = output if isinstance(output, tuple) else (output,)
            for tensor in outputs:
                if isinstance(tensor, torch.Tensor):
                    seen.add(name)
                    assert torch.isfinite(tensor).all(), name

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(check(name))
    ids, mask = left_padded(tokens(1, 3, seed=1), tokens(1, 9, seed=2))
    generate(model, ids, attention_mask=mask)
    assert set(gates(model)) <= seen and len(gates(model)) == 2 * len(EVERY_POSITION)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_continuous_batching_gives_the_tokens_of_generate(variant, attention):
    model = tiny_model(**VARIANTS[variant], attn_implementation=attention)
    prompts = [tokens(1, length, seed=length) for length in (3, 9, 5)]
    alone = [generate(model, prompt)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    answers = model.generate_batch(
        [prompt[0].tolist() for prompt in prompts],
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64),
    )
    answers = [answers[key].generated_tokens for key in sorted(answers, key=lambda key: int(key.split("_")[-1]))]
    assert answers == alone

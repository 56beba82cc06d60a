"""Packed samples do not see each other, and losses and gradients do not depend on how a batch is cut up."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import CACHE, EVERY_POSITION, gates, tiny_model, tokens
from transformers import DataCollatorWithFlattening, DynamicCache, Trainer, TrainingArguments

VARIANTS = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "every position": {"gate_positions": EVERY_POSITION, "gate_bias": True},
}
FIRST, SECOND = tokens(2, 4, seed=1), tokens(2, 6, seed=2)
PACKED = torch.cat([FIRST, SECOND], dim=1)
POSITIONS = torch.tensor([[*range(4), *range(6)]])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_equal_their_stand_alone_runs(attention, variant):
    model = tiny_model(**VARIANTS[variant], attn_implementation=attention)
    logits = model(PACKED, position_ids=POSITIONS.expand(2, -1), use_cache=False).logits
    torch.testing.assert_close(logits[:, :4], model(FIRST).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[:, 4:], model(SECOND).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_flattened_batch_has_the_loss_of_its_samples(variant):
    model = tiny_model(**VARIANTS[variant])
    samples = [tokens(1, length, seed=length) for length in (3, 9, 5)]
    losses = [model(sample, labels=sample).loss * (sample.shape[1] - 1) for sample in samples]
    batch = DataCollatorWithFlattening()([{"input_ids": sample[0].tolist()} for sample in samples])
    assert "attention_mask" not in batch
    packed = model(**batch, use_cache=False).loss
    torch.testing.assert_close(packed, sum(losses) / (3 + 9 + 5 - 3), atol=1e-5, rtol=1e-5)


# In these calls transformers' masks ignore the boundaries.
BLURRED = {
    "by the default cache": {},
    "by the default cache in training": {"labels": PACKED},
    "by a wanted cache": {"use_cache": True},
    "by a cache object": {CACHE: DynamicCache},
    "by a mask of ones": {"attention_mask": torch.ones_like(PACKED), "use_cache": False},
    "by a padding mask": {"attention_mask": torch.tensor([[1] * 10, [1] * 9 + [0]]), "use_cache": False},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("blurred", BLURRED)
def test_boundaries_are_kept_or_their_loss_is_announced(blurred, attention):
    model = tiny_model(attn_implementation=attention).train("training" in blurred)
    options = dict(BLURRED[blurred])
    if CACHE in options:
        options[CACHE] = options[CACHE](config=model.config)
    expected = model(SECOND).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            logits = model(PACKED, position_ids=POSITIONS.expand(2, -1), **options).logits[:, 4:]
        except ValueError as error:
            assert "position_ids" in str(error)
            return
    if not any("position_ids" in str(warning.message) for warning in caught):
        torch.testing.assert_close(logits[0], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padded_and_speculative_generation_raise_no_false_alarm(cache):
    model = tiny_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :6] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*position_ids")
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
        model.generate(ids[:1].repeat(1, 2), prompt_lookup_num_tokens=3, **options)
        model(
            ids,
            attention_mask=mask.flip(1),
            position_ids=(mask.flip(1).cumsum(1) - 1).masked_fill(mask.flip(1) == 0, 1),
        )
        model(ids, position_ids=torch.arange(9)[None], use_cache=True)


class UnevenLabels(torch.utils.data.Dataset):
    """Eight samples of 12 tokens, of which between 1 and 11 count."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = tokens(1, 12, seed=index)[0]
        labels = ids.clone()
        labels[: 12 - [1, 11, 3, 7, 2, 9, 5, 4][index]] = -100
        return {"input_ids": ids, "labels": labels}


def first_step(batch_size, accumulation, folder):
    model = tiny_model(attention_dropout=0.0)
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
    return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]


def test_accumulation_does_not_change_loss_and_gradient(tmp_path):
    batch = torch.utils.data.default_collate(list(UnevenLabels()))
    model = tiny_model()
    loss = model(**batch).loss  # the mean over all counted tokens
    loss.backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    for batch_size, accumulation in [(8, 1), (2, 4)]:
        step = first_step(batch_size, accumulation, tmp_path)
        assert step == pytest.approx((loss.item(), norm.item()), abs=1e-4)


def gate_only(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".g_proj" in name)
    return model


def lora_only(*targets):
    def wrap(model):
        adapted = get_peft_model(model, LoraConfig(target_modules=list(targets), r=2, init_lora_weights=False))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return adapted

    return wrap


FROZEN_BASES = {
    "gate only": gate_only,
    "LoRA on the gate": lora_only("g_proj"),
    "LoRA on q and v": lora_only("q_proj", "v_proj"),
}


def gradients(model):
    model.train()
    model(PACKED, labels=PACKED).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found and all(gradient is not None and gradient.abs().max() > 0 for gradient in found.values())
    return found


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("trained", FROZEN_BASES)
def test_checkpointing_with_a_frozen_base_keeps_the_gradients(trained, reentrant, granularity):
    plain = FROZEN_BASES[trained](tiny_model(gate_granularity=granularity))
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        checkpointed.enable_input_require_grads()  # re-entrant checkpoints need an input that wants gradients
    runs = []
    checkpointed.get_submodule(next(iter(gates(checkpointed)))).register_forward_hook(lambda *call: runs.append(call))
    expected, found = gradients(plain), gradients(checkpointed)
    assert len(runs) == 2  # forward, and again for the backward
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


STARTS = {"random": None, "zeros": 0.0}
GATES = {
    "elementwise": {"gate_positions": EVERY_POSITION},
    # q/k norm divides a factor of the whole head out again, so headwise query and key gates need it off to act.
    "headwise": {"gate_positions": EVERY_POSITION[:4], "gate_granularity": "headwise", "use_qk_norm": False},
    "head-shared": {"gate_positions": ["query", "key", "value", "attn_output"], "gate_head_shared": True},
    "constant": {"gate_positions": EVERY_POSITION, "gate_input": "constant"},
    "first channels": {"gate_input_channels": 5, "gate_bias": True},
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("start", STARTS)
def test_every_gate_learns_from_its_start(gate, start):
    model = tiny_model(**GATES[gate], gate_initializer_range=STARTS[start])
    for module in gates(model).values():
        model._init_weights(module)
    if start == "zeros":
        assert all((parameter == 0).all() for module in gates(model).values() for parameter in module.parameters())
    model.train()
    model(PACKED, labels=PACKED).loss.backward()
    for name, module in gates(model).items():
        for parameter in module.parameters():
            assert parameter.grad.abs().max() > 1e-6, name

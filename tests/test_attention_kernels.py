"""Attention and its log-sum-exp without a full map: kernels, blocks and hand-worked numbers agree."""

import math

import pytest
import torch
from torch.nn import functional

from gated_qwen.diagnostics import attention_kernels
from gated_qwen.diagnostics.attention_kernels import (
    attention_with_logsumexp,
    blocked_attention,
    cuda_kernel,
    query_blocks,
)
from gated_qwen.diagnostics.uniform import uniform_first_token_share, uniform_share
from gated_qwen.diagnostics.visible_keys import visible_keys

LENGTH, SCALE = 33, 0.3


def states(key_heads=2, dim=8, value_dim=None, dtype=torch.float32, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, length, dim), (2, key_heads, length, dim), (2, key_heads, length, value_dim or dim)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def padding_mask():
    """(B, 1, T, S) bool: causal, the first 5 tokens of sequence 0 are padding, which sees nothing."""
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[0, :, :, :5] = False
    return mask


def additive_mask():
    """A bias of its own for each head, as ALiBi has it, with the smallest number for hidden keys."""
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    bias = torch.tensor([0.5, 0.25, 0.1, 0.0]).view(1, 4, 1, 1) * distance
    return bias.masked_fill(distance > 0, torch.finfo(torch.float32).min)


MASKS = {
    "all keys": {},
    "causal": {"causal": True},
    "padding": {"mask": padding_mask()},
    "additive": {"mask": additive_mask()},
}


def full_map(query, key, *, mask=None, causal=False, softcap=None, sink_logits=None):
    """Weights (B, H, T, S) and log-sum-exp in float64, written out."""
    query, key = query.detach().double(), key.detach().double().repeat_interleave(4 // key.shape[1], dim=1)
    scores = SCALE * query @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    total = torch.exp(scores).sum(-1)
    if sink_logits is not None:
        total = total + torch.exp(sink_logits.double())[:, None]
    return torch.exp(scores) / total[..., None], torch.log(total)


@pytest.fixture(params=["kernel", "blocks", "small blocks"])
def attend(request, monkeypatch):
    if request.param == "small blocks":  # seven queries at a time
        monkeypatch.setattr(attention_kernels, "BLOCK_BYTES", 7 * 2 * 4 * LENGTH * 4)
    return attention_with_logsumexp if request.param == "kernel" else blocked_attention


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("masking", MASKS)
def test_output_and_logsumexp_are_those_of_the_full_map(attend, masking, key_heads):
    query, key, value = states(key_heads)
    output, logsumexp = attend(query, key, value, scale=SCALE, **MASKS[masking])
    weights, expected = full_map(query, key, **MASKS[masking])
    seen = expected.isfinite()
    weights[~seen] = 0.0  # a query that sees nothing writes nothing
    wanted = weights @ value.detach().double().repeat_interleave(4 // key_heads, dim=1)
    torch.testing.assert_close(output.double(), wanted, atol=2e-6, rtol=0)
    torch.testing.assert_close(logsumexp.double()[seen], expected[seen], atol=2e-6, rtol=0)


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_is_that_of_pytorchs_own_attention_to_the_bit(dtype, masking, key_heads):
    query, key, value = states(key_heads, dtype=dtype)
    options = dict(MASKS[masking])
    if masking == "additive":
        options["mask"] = options["mask"].to(dtype)
    output, logsumexp = attention_with_logsumexp(query, key, value, scale=SCALE, **options)
    key, value = (x.repeat_interleave(4 // key_heads, dim=1) for x in (key, value))
    own = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=options.get("mask"), is_causal="causal" in options, scale=SCALE
    )
    assert torch.equal(output, own)
    assert logsumexp.dtype == torch.float32 and not logsumexp.requires_grad


def test_a_mask_may_be_cut_into_blocks(monkeypatch):
    query, key, value = states()
    whole = attention_with_logsumexp(query, key, value, padding_mask(), scale=SCALE)
    monkeypatch.setattr(attention_kernels, "BLOCK_BYTES", 7 * 2 * LENGTH * 4)
    cut = attention_with_logsumexp(query, key, value, padding_mask(), scale=SCALE)
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.0, -1.0, 8.0])], ids=["no sinks", "sinks"])
def test_soft_capping_and_learned_sinks_enter_the_weights(masking, softcap, sinks):
    query, key, value = states()
    options = {**MASKS[masking], "softcap": softcap, "sink_logits": sinks}
    output, logsumexp = attention_with_logsumexp(query, key, value, scale=SCALE, **options)
    weights, expected = full_map(query, key, **options)
    seen = (weights.sum(-1) > 0) & expected.isfinite()
    wanted = (weights @ value.detach().double().repeat_interleave(2, dim=1))[seen]
    torch.testing.assert_close(output.double()[seen], wanted, atol=2e-6, rtol=0)
    torch.testing.assert_close(logsumexp.double()[seen], expected[seen], atol=2e-6, rtol=0)
    assert not output.isnan().any()


def test_values_of_another_width_fall_back_to_blocks():
    query, key, value = states(value_dim=5)
    output, logsumexp = attention_with_logsumexp(query, key, value, scale=SCALE, causal=True)
    weights, expected = full_map(query, key, causal=True)
    wanted = weights @ value.detach().double().repeat_interleave(2, dim=1)
    torch.testing.assert_close(output.double(), wanted, atol=2e-6, rtol=0)
    torch.testing.assert_close(logsumexp.double(), expected, atol=2e-6, rtol=0)


def test_the_reference_is_exact_in_float64():
    query, key, value = states(dtype=torch.float64)
    _, logsumexp = blocked_attention(query, key, value, scale=SCALE, causal=True, compute_dtype=torch.float64)
    torch.testing.assert_close(logsumexp, full_map(query, key, causal=True)[1], atol=1e-14, rtol=0)


def test_gradients_are_those_of_pytorchs_own_attention(attend):
    gradients = []
    for own in (False, True):
        query, key, value = states(key_heads=4)
        if own:
            output = functional.scaled_dot_product_attention(query, key, value, attn_mask=padding_mask(), scale=SCALE)
        else:
            output, _ = attend(query, key, value, padding_mask(), scale=SCALE)
        output.square().sum().backward()
        gradients.append([query.grad, key.grad, value.grad])
    torch.testing.assert_close(gradients[0], gradients[1], atol=2e-6, rtol=1e-5)


def test_dropout_acts_on_the_output_and_not_on_the_logsumexp(attend):
    query, key, value = states(key_heads=4)
    kept, logsumexp = attend(query, key, value, scale=SCALE, causal=True)
    dropped, same = attend(query, key, value, scale=SCALE, causal=True, dropout=0.5)
    assert torch.equal(logsumexp, same) and not torch.allclose(kept, dropped)
    zeros = (dropped[:, :, 0] == 0).all(-1)  # the first query has one weight, which is dropped or doubled
    torch.testing.assert_close(dropped[:, :, 0], torch.where(zeros[..., None], 0.0, 2 * kept[:, :, 0]))
    assert zeros.any() and not zeros.all()


def test_the_worked_example_of_two_tokens():
    """Weights (0.4, 0.6), values (2, 1) and (0, 3): output (0.8, 2.2), and gated by (0.1, 0.8) it is (0.08, 1.76)."""
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[math.log(0.4), 5.0], [math.log(0.6), -5.0]]]])
    value = torch.tensor([[[[2.0, 1.0], [0.0, 3.0]]]])
    output, logsumexp = attention_with_logsumexp(query, key, value, scale=1.0)
    torch.testing.assert_close(output[0, 0, 0], torch.tensor([0.8, 2.2]))
    torch.testing.assert_close(torch.exp(math.log(0.4) - logsumexp).item(), 0.4)
    torch.testing.assert_close(output[0, 0, 0] * torch.tensor([0.1, 0.8]), torch.tensor([0.08, 1.76]))


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "masked", "expected"),
    [
        (BF16, 128, (9, 0), False, "_cuda_flash"),
        (FP16, 64, (8, 0), False, "_cuda_flash"),
        (BF16, 128, (9, 0), True, "_cuda_efficient"),  # flash takes no mask
        (FP32, 128, (9, 0), False, "_cuda_efficient"),  # nor fp32
        (FP16, 64, (7, 5), False, "_cuda_efficient"),  # nor older devices
        (BF16, 320, (9, 0), False, "_cuda_efficient"),  # nor wide heads
        (BF16, 64, (7, 5), False, None),
        (BF16, 100, (9, 0), False, None),  # not a multiple of 8
        (FP32, 36, (9, 0), True, "_cuda_efficient"),
        (FP32, 34, (9, 0), True, None),
        (FP64, 64, (9, 0), False, None),
    ],
)
def test_the_cuda_kernel_fits_dtype_shape_mask_and_device(dtype, head_dim, capability, masked, expected):
    kernel = cuda_kernel(dtype, head_dim, capability, masked=masked)
    assert (kernel and kernel.__name__) == expected


@pytest.mark.parametrize("masked", [False, True])
def test_the_cuda_kernels_take_our_arguments_and_give_our_shapes(masked):
    """Without a device the operators' own shape rules are all that can be run of them."""
    query, key, value = (torch.empty(2, 4, LENGTH, 16, dtype=BF16, device="meta") for _ in range(3))
    bias = torch.empty(2, 1, LENGTH, LENGTH, dtype=BF16, device="meta") if masked else None
    kernel = cuda_kernel(BF16, 16, (9, 0), masked=masked)
    output, logsumexp = kernel(query, key, value, bias, SCALE, not masked)
    assert output.shape == (2, 4, LENGTH, 16) and logsumexp.shape == (2, 4, LENGTH)
    assert logsumexp.dtype == torch.float32


def test_the_bias_of_the_efficient_kernel_lies_on_aligned_rows():
    bias = attention_kernels._aligned_bias(torch.randn(2, 1, LENGTH, LENGTH), 2, 4)
    assert bias.shape == (2, 4, LENGTH, LENGTH) and bias.stride(2) % 16 == 0


def test_blocks_cover_every_query_once():
    blocks = query_blocks(1000, attention_kernels.BLOCK_BYTES // 300)
    assert [(b.start, b.stop) for b in blocks] == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert query_blocks(3, 2**40) == [slice(0, 1), slice(1, 2), slice(2, 3)]


@pytest.mark.parametrize("dtype", [torch.bool, FP32, BF16, FP16])
def test_visible_keys_are_read_from_any_mask(dtype, monkeypatch):
    monkeypatch.setattr(attention_kernels, "BLOCK_BYTES", 300)
    visible = torch.tensor(
        [[[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]], [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]]], dtype=torch.bool
    )[:, None]
    mask = visible
    if dtype != torch.bool:
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    seen = visible_keys(mask, 2, 3, 4, causal=False, device=mask.device)
    assert seen.count.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert seen.first[0, 1:].tolist() == [1, 1] and seen.first[1].tolist() == [0, 0, 1]
    assert seen.last[0, 1:].tolist() == [1, 2] and seen.last[1].tolist() == [0, 1, 3]


@pytest.mark.parametrize(("length", "percent"), [(10, 29.29), (64, 7.412), (4096, 0.2172)])
def test_uniform_attention_puts_the_harmonic_number_over_the_length_on_the_first_token(length, percent):
    assert 100 * uniform_first_token_share(length) == pytest.approx(percent, rel=1e-3)
    seen = visible_keys(None, 1, length, length, causal=True, device=torch.device("cpu"))
    assert uniform_share(seen.count).double().mean().item() == pytest.approx(uniform_first_token_share(length), 1e-6)


def test_uniform_attention_on_several_keys():
    assert uniform_share(torch.tensor([0, 1, 3, 4, 8]), 4).tolist() == [0.0, 1.0, 1.0, 1.0, 0.5]
    assert uniform_first_token_share(4, skip_queries=2) == pytest.approx((1 / 3 + 1 / 4) / 2)
    with pytest.raises(ValueError, match="of 4 queries none is left"):
        uniform_first_token_share(4, skip_queries=4)

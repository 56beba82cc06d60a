"""Which tokens are real and where each lies in its document, as a probe sees it inside the forward pass."""

import pytest
import torch
from probe_models import probe_model
from tiny import CACHE, tiny_model, tokens
from transformers import StaticCache, T5Config, T5ForConditionalGeneration

from gated_qwen.diagnostics.decoder import attention_module, decoder_body, decoder_layers, ffn_output_module
from gated_qwen.diagnostics.observed_batch import BatchObserver


@pytest.fixture
def observed():
    """A tiny model, its observer (entered) and the list of what was current in its first layer."""
    model, seen = tiny_model(), []
    with BatchObserver(model) as observer, torch.no_grad():
        model.model.layers[0].register_forward_hook(lambda *_: seen.append(observer.current))
        yield model, observer, seen


def test_plain_batches_are_counted_on(observed):
    model, observer, seen = observed
    model(tokens(2, 5))
    model(input_ids=tokens(3, 4))
    assert observer.current is None
    assert seen[0].position.tolist() == [list(range(5))] * 2
    assert seen[1].sequence.tolist() == [[2] * 4, [3] * 4, [4] * 4]
    assert seen[1].valid.all() and seen[1].mask is None and not seen[1].padded


@pytest.mark.parametrize("call", ["base model", "embeddings", "keyword"])
def test_every_way_to_call_the_model_is_seen(observed, call):
    model, _, seen = observed
    ids = tokens(2, 5)
    if call == "base model":
        model.model(ids)
    elif call == "embeddings":
        model(inputs_embeds=model.get_input_embeddings()(ids))
    else:
        model(input_ids=ids)
    assert seen[0].position.tolist() == [list(range(5))] * 2
    assert (seen[0].input_ids is None) == (call == "embeddings")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(observed, side):
    model, _, seen = observed
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    model(tokens(2, 5), attention_mask=real if side == "left" else real.flip(1))
    assert seen[0].valid.tolist() == (real if side == "left" else real.flip(1)).bool().tolist()
    assert seen[0].position[0][seen[0].valid[0]].tolist() == [0, 1, 2]
    assert seen[0].mask is seen[0].valid


def test_a_prepared_mask_shows_padding_on_its_diagonal(observed):
    model, _, seen = observed
    real = torch.tensor([[False, True, True], [True, True, True]])
    prepared = (torch.ones(3, 3).tril().bool() & real[:, None, None, :]).expand(2, 1, 3, 3)
    model(tokens(2, 3), attention_mask=prepared)
    model(tokens(2, 3), attention_mask=torch.zeros(2, 1, 3, 3).masked_fill(~prepared, torch.finfo(torch.float32).min))
    for batch in seen:
        assert batch.valid.tolist() == real.tolist()
    model(tokens(2, 3), attention_mask=prepared[:1])  # one mask for all rows
    assert seen[-1].valid.tolist() == [real[0].tolist()] * 2


def test_packed_documents_restart(observed):
    model, _, seen = observed
    model(tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 0]]), use_cache=False)
    assert seen[0].position.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert seen[0].document.tolist() == [[0, 0, 0, 1, 1, 2]]


def test_one_row_of_positions_serves_all_rows_and_offsets_do_not_matter(observed):
    model, _, seen = observed
    model(tokens(2, 4), position_ids=torch.tensor([[7, 8, 0, 1]]), use_cache=False)
    assert seen[0].position.tolist() == [[0, 1, 0, 1]] * 2


def test_position_ids_of_left_padding_do_not_start_a_document(observed):
    model, _, seen = observed
    real = torch.tensor([[0, 0, 1, 1]])
    model(tokens(1, 4), attention_mask=real, position_ids=torch.tensor([[1, 1, 0, 1]]))
    assert seen[0].document.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_chunks_with_a_cache_go_on(observed, static):
    model, _, seen = observed
    ids, real = tokens(2, 9), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    cache = StaticCache(model.config, max_cache_len=16) if static else None
    for first, last in ((0, 5), (5, 8), (8, 9)):
        chunk = {"input_ids": ids[:, first:last], "attention_mask": real[:, :last], CACHE: cache, "use_cache": True}
        cache = model(**chunk).past_key_values
    assert torch.cat([batch.position for batch in seen], 1)[real.bool()].tolist() == [*range(5), *range(9)]
    assert torch.cat([batch.valid for batch in seen], 1).tolist() == real.bool().tolist()
    assert {batch.sequence_offset for batch in seen} == {0}
    model(ids)
    assert seen[-1].sequence_offset == 2


def test_documents_go_on_over_chunks(observed):
    model, _, seen = observed
    ids, places, cache = tokens(1, 8), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]]), None
    for first, last in ((0, 3), (3, 6), (6, 8)):
        with pytest.warns(UserWarning, match="see each other") if first else torch.no_grad():
            chunk = {"input_ids": ids[:, first:last], "position_ids": places[:, first:last], CACHE: cache}
            cache = model(**chunk, use_cache=True).past_key_values
    assert torch.cat([batch.position for batch in seen], 1).tolist() == places.tolist()
    assert torch.cat([batch.document for batch in seen], 1).tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]


def test_a_cache_that_was_filled_unseen_still_counts():
    model, seen = tiny_model(), []
    real = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        cache = model(tokens(2, 4), attention_mask=real[:, :4], use_cache=True).past_key_values
        with BatchObserver(model) as observer:
            model.model.layers[0].register_forward_hook(lambda *_: seen.append(observer.current))
            model(**{"input_ids": tokens(2, 1), "attention_mask": real, CACHE: cache})
    assert seen[0].position.tolist() == [[3], [4]]


def test_generation_is_seen_token_by_token(observed):
    model, _, seen = observed
    ids, real = tokens(2, 4), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    model.generate(ids, attention_mask=real, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert [batch.position[:, -1].tolist() for batch in seen] == [[2, 3], [3, 4], [4, 5]]
    assert [batch.input_ids.shape[1] for batch in seen] == [4, 1, 1]


def test_layers_that_checkpointing_runs_again_find_no_batch(observed):
    model, observer, _ = observed
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append(observer.current))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with torch.enable_grad():
        model(tokens(1, 4), use_cache=False).logits.sum().backward()
    assert [batch is not None for batch in seen] == [True, False]
    assert observer.latest is not None


def test_nothing_is_left_behind_also_after_an_exception():
    model = tiny_model()
    observer = BatchObserver(model)
    with pytest.raises(IndexError), observer:
        model(torch.tensor([[64]]))  # beyond the vocabulary
    assert observer.current is None
    assert not model.model._forward_pre_hooks and not model.model._forward_hooks


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "qwen3_next hybrid", "elementwise"])
def test_layers_and_their_parts_are_found(name):
    model = probe_model(name)
    for root in (model, model.base_model):
        layers = decoder_layers(root)
        assert len(layers) == model.config.num_hidden_layers
        assert decoder_body(root) is model.base_model
        assert all(attention_module(layer) is not None and ffn_output_module(layer) is not None for layer in layers)


def test_an_encoder_decoder_model_is_refused():
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    with pytest.raises(ValueError, match="encoder-decoder"):
        BatchObserver(T5ForConditionalGeneration(config))

"""A run: scores, batches, resuming, limits; perplexity; result files side by side."""

import math
import re

import pytest
import torch
from small_tokenizers import tokenizer_of
from tiny import tiny_model
from torch.nn.functional import cross_entropy
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gated_qwen.evaluation import evaluate
from gated_qwen.evaluation.compare import compare
from gated_qwen.evaluation.evaluate import run_plan
from gated_qwen.evaluation.generation import generate_answers
from gated_qwen.evaluation.heat_map import draw_heat_map
from gated_qwen.evaluation.perplexity import measure_perplexity, position_nll
from gated_qwen.evaluation.plan import Plan, longest_context
from gated_qwen.evaluation.results import summarize
from gated_qwen.evaluation.scoring import match_all, match_part

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("byte-level BPE")


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), max_position_embeddings=1024)


def plan(**options):
    defaults = {"tasks": ("niah_single",), "lengths": (512,), "depths": (0.0, 1.0), "samples": 2, "max_new_tokens": 4}
    return Plan(**{**defaults, **options})


class TestScores:
    """Worked by hand."""

    @pytest.mark.parametrize(
        ("prediction", "answers", "share", "any_of_them"),
        [
            (" 1234567.", ["1234567"], 1.0, 1.0),
            (" 123456", ["1234567"], 0.0, 0.0),
            ("They are 11 and 22; no, 33", ["11", "22", "33", "44"], 0.75, 1.0),
            ("44 11", ["11", "44"], 1.0, 1.0),
            ("BOKUNE, bokune", ["bokune", "ralale"], 0.5, 1.0),
            ("", ["a"], 0.0, 0.0),
        ],
    )
    def test_a_prediction(self, prediction, answers, share, any_of_them):
        assert match_all(prediction, answers) == share
        assert match_part(prediction, answers) == any_of_them

    @pytest.mark.parametrize("answers", [[], "one string"])
    def test_answers_are_a_list(self, answers):
        for score in (match_all, match_part):
            with pytest.raises(ValueError, match="a list"):
                score("text", answers)

    def test_a_summary_is_the_mean_of_each_cell_in_percent(self):
        cells = [("a", 1, 0.0, 1.0), ("a", 1, 0.0, 0.25), ("a", 1, 1.0, 0.0), ("b", 2, None, 0.5)]
        records = [dict(zip(("task", "length", "depth", "score"), cell, strict=True)) for cell in cells]
        assert [(row["task"], row["depth"], row["samples"], row["score"]) for row in summarize(records)] == [
            ("a", 0.0, 2, 62.5),
            ("a", 1.0, 1, 0.0),
            ("b", None, 1, 50.0),
        ]


class TestGeneration:
    def test_the_neighbours_in_a_batch_do_not_matter(self, model, tokenizer):
        prompts = [tokenizer(text)["input_ids"] for text in ("The street", "A cat walks along the wall. " * 5, "Rain")]
        together = generate_answers(model, tokenizer, prompts, 8)
        assert together == [generate_answers(model, tokenizer, [prompt], 8)[0] for prompt in prompts]

    def test_it_is_greedy_whatever_the_model_asks_for(self, model, tokenizer):
        prompt = tokenizer("The street is")["input_ids"]
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        model.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=3.0)
        try:
            answer = generate_answers(model, tokenizer, [prompt], 6)
        finally:
            model.generation_config.update(do_sample=False, temperature=None, repetition_penalty=None)
        assert answer == [tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)]

    def test_a_row_ends_when_its_answers_are_there(self, model, tokenizer):
        prompt = tokenizer("The street is")["input_ids"]
        (whole,) = generate_answers(model, tokenizer, [prompt], 12)
        (part,) = generate_answers(model, tokenizer, [prompt], 12, stop_at=[[whole[:3]]])
        assert whole.startswith(part) and whole[:3] in part and len(part) < len(whole)


class TestLimits:
    def test_at_the_longest_context_needle_and_question_survive(self, model, tokenizer, monkeypatch):
        seen = []
        generate = type(model).generate

        def spy(self, input_ids, **options):
            seen.append(input_ids)
            return generate(self, input_ids=input_ids, **options)

        monkeypatch.setattr(type(model), "generate", spy)
        run = run_plan(model, tokenizer, plan(lengths=(1024,), samples=1))
        assert len(seen) == 2
        for ids, record in zip(seen, run.records, strict=True):
            text = tokenizer.decode(ids[0])
            assert ids.shape == (1, 1024 - 4)
            assert re.search(rf"The secret number for [\w-]+ is {record['answers'][0]}\.", text)
            assert re.search(r"What is the secret number for [\w-]+, according to the text\?\nThe .* is$", text)

    def test_beyond_it_is_an_error_and_never_a_cut(self, model, tokenizer):
        with pytest.raises(ValueError, match="length 1025 is over the model's longest context of 1024 tokens"):
            run_plan(model, tokenizer, plan(lengths=(512, 1025)))
        assert len(run_plan(model, tokenizer, plan(lengths=(1025,), beyond_limit=True)).records) == 4

    def test_the_extended_length_is_seen(self, tokenizer):
        for positions in (512, 1024):
            extended = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=positions, rope_parameters=YARN)
            assert longest_context(extended.config) == 1024
        assert len(run_plan(extended, tokenizer, plan(lengths=(1024,))).records) == 4

    def test_a_length_that_is_too_small_is_refused_before_anything_runs(self, model, tokenizer, tmp_path):
        with pytest.raises(ValueError, match="length 60 is too small; the least is"):
            run_plan(model, tokenizer, plan(lengths=(1024, 60)), path=tmp_path / "records.jsonl")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tasks": ("niah",)}, "task 'niah'"),
            ({"tasks": ("perplexity",)}, "--text"),
            ({"depths": (2.0,)}, "depth 2.0"),
            ({"samples": 0}, "at least one"),
            ({"lengths": ()}, "at least one"),
        ],
    )
    def test_a_plan_without_sense_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            plan(**options)


class TestRuns:
    def test_an_oracle_scores_100_and_a_mute_0(self, model, tokenizer, monkeypatch):
        def oracle(model, tokenizer, prompts, max_new_tokens, stop_at):
            texts = [tokenizer.decode(prompt) for prompt in prompts]
            asked = [re.search(r"the secret numbers? for (.*), according", text).group(1) for text in texts]
            needles = [dict(re.findall(r"number for ([\w-]+) is (\d+)\.", text)) for text in texts]
            return [
                " ".join(value for key, value in found.items() if key in keys)
                for keys, found in zip(asked, needles, strict=True)
            ]

        tasks = ("niah_single", "niah_multikey", "niah_multiquery")
        for answer, score in ((oracle, 100.0), (lambda model, tokenizer, prompts, *a, **k: [""] * len(prompts), 0.0)):
            monkeypatch.setattr(evaluate, "generate_answers", answer)
            run = run_plan(model, tokenizer, plan(tasks=tasks, lengths=(700,), batch_size=2, samples=3))
            assert [row["score"] for row in summarize(run.records)] == [score] * 5

    def test_a_resumed_run_equals_an_uninterrupted_one(self, model, tokenizer, tmp_path, monkeypatch):
        options = plan(tasks=("niah_single", "frequent_words"), lengths=(512, 450), samples=3, batch_size=2)
        whole, partial = tmp_path / "whole.jsonl", tmp_path / "partial.jsonl"
        expected = run_plan(model, tokenizer, options, path=whole)
        lines = whole.read_text().splitlines(keepends=True)
        assert len(lines) == 1 + 18
        # After the settings, in the middle of a batch, at its end, in the middle of a line.
        for kept in (lines[:1], lines[:2], lines[:3], [*lines[:7], lines[7][:20]], lines):
            partial.write_text("".join(kept))
            batches = []
            run = run_plan(model, tokenizer, options, path=partial, resume=True, progress=batches.append)
            assert run == expected and partial.read_text() == whole.read_text()
            assert sum(batches) == 18

    def test_an_interrupted_run_leaves_what_it_has(self, model, tokenizer, tmp_path, monkeypatch):
        calls = []

        def interrupted(*arguments, **options):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return generate_answers(*arguments, **options)

        monkeypatch.setattr(evaluate, "generate_answers", interrupted)
        model.train()
        with pytest.raises(KeyboardInterrupt):
            run_plan(model, tokenizer, plan(), path=tmp_path / "records.jsonl")
        assert model.training and not model.eval().training
        assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3

    @pytest.mark.parametrize(
        ("change", "name"),
        [({"seed": 1}, "seed"), ({"lengths": (600,)}, "lengths"), ({"depths": (0.5,)}, "depths"), ({}, "dtype")],
    )
    def test_other_settings_are_refused(self, change, name, model, tokenizer, tmp_path):
        path = tmp_path / "records.jsonl"
        run_plan(model, tokenizer, plan(samples=1), path=path, settings={"dtype": "float32"})
        before = path.read_text()
        dtype = "float32" if change else "bfloat16"
        for resume, error, message in ((True, ValueError, f"{name} was"), (False, FileExistsError, "--resume")):
            with pytest.raises(error, match=message):
                changed = plan(samples=1, **change)
                run_plan(model, tokenizer, changed, path=path, settings={"dtype": dtype}, resume=resume)
        assert path.read_text() == before

    def test_a_file_of_something_else_is_not_gone_on_with(self, model, tokenizer, tmp_path):
        for content in ("", "words\n", "[1]\n", '{"a": 1}\n'):
            (tmp_path / "records.jsonl").write_text(content)
            with pytest.raises(ValueError, match="not a result file"):
                run_plan(model, tokenizer, plan(), path=tmp_path / "records.jsonl", resume=True)


def naive_nll(model, ids):
    with torch.no_grad():
        return cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:], reduction="none")


class TestPerplexity:
    @pytest.mark.parametrize(
        "build",
        [
            lambda: tiny_model(),
            lambda: tiny_model(gate_positions=[], tie_word_embeddings=True),
            lambda: tiny_model(gate_granularity="headwise", attn_output_norm=True),
            lambda: LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
                )
            ),
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
        ],
        ids=["gated", "ungated, tied", "headwise, normed", "Llama", "GPT-2"],
    )
    @pytest.mark.parametrize("chunk", [1, 7, 1000])
    def test_it_equals_the_full_logits(self, build, chunk):
        model = build().eval()
        ids = torch.randint(64, (100,))
        assert torch.allclose(position_nll(model, ids, chunk=chunk), naive_nll(model, ids), rtol=0, atol=1e-5)

    def test_buckets_are_means_over_positions(self):
        model = tiny_model()
        ids = torch.randint(64, (100,))
        nll = naive_nll(model, ids).double()
        result = measure_perplexity(model, ids.tolist(), buckets=4, chunk=16)
        assert [(first, last) for first, last, _ in result.buckets] == [(1, 26), (26, 51), (51, 75), (75, 100)]
        for first, last, mean in result.buckets:
            assert mean == pytest.approx(nll[first - 1 : last - 1].mean().item(), abs=1e-5)
        assert result.nll == pytest.approx(nll.mean().item(), abs=1e-5)
        assert result.perplexity == pytest.approx(math.exp(result.nll))
        assert len(measure_perplexity(model, [1, 2, 3], buckets=8).buckets) == 2

    def test_no_more_logits_than_a_chunk_ever_exist(self, monkeypatch):
        model, rows = tiny_model(), []
        model.get_output_embeddings().register_forward_hook(
            lambda module, inputs, output: rows.append(output.shape[-2])
        )
        position_nll(model, torch.randint(64, (200,)), chunk=16)
        assert max(rows) == 32  # those of the check; 16 after that
        assert sum(rows[2:]) == 199 and max(rows[2:]) == 16

    def test_a_model_that_caps_its_logits_is_refused(self):
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = Gemma2Config(vocab_size=64, **shape, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5)
        model = Gemma2ForCausalLM(config).eval()
        with pytest.raises(ValueError, match="Gemma2ForCausalLM changes its logits after the head"):
            position_nll(model, torch.randint(64, (20,)))

    def test_one_token_has_no_perplexity(self):
        with pytest.raises(ValueError, match="at least 2 tokens"):
            position_nll(tiny_model(), [1])

    def test_windows_of_a_text_follow_each_other(self, tmp_path):
        tokenizer = tokenizer_of("Unigram")
        model = tiny_model(vocab_size=len(tokenizer))
        text = "The street is empty. A cat walks along the wall. Somebody closes a door. " * 10
        (tmp_path / "text.txt").write_text(text)
        options = plan(tasks=("perplexity",), lengths=(40,), samples=2, text=tmp_path / "text.txt")
        run = run_plan(model, tokenizer, options)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for i, record in enumerate(run.records):
            window = torch.tensor([tokenizer.bos_token_id, *ids[39 * i : 39 * (i + 1)]])
            assert record["nll"] == pytest.approx(naive_nll(model, window).mean().item(), abs=1e-5)
        (row,) = summarize(run.records)
        assert row["perplexity"] == pytest.approx(math.exp(sum(record["nll"] for record in run.records) / 2))
        with pytest.raises(ValueError, match="tokens, and the perplexity windows need 1600"):
            run_plan(model, tokenizer, plan(tasks=("perplexity",), lengths=(400,), samples=4, text=options.text))


def summary(cells, **settings):
    settings = {"seed": 0, "samples": 1, "text": "noise", "chat_template": False, "max_new_tokens": None, **settings}
    return {
        "settings": settings,
        "cells": [dict(zip(("task", "length", "depth", "score"), c, strict=True)) for c in cells],
    }


class TestComparison:
    def test_means_are_over_the_depths_that_both_have(self):
        before = summary([("a", 8, 0.0, 80.0), ("a", 8, 1.0, 40.0), ("b", 8, None, 10.0)])
        after = summary([("a", 8, 0.0, 100.0), ("b", 8, None, 30.0), ("a", 16, 0.0, 50.0), ("a", 16, 1.0, 70.0)])
        rows = [(change.task, change.length, change.before, change.after) for change in compare(before, after)]
        assert rows == [
            ("a", 8, 80.0, 100.0),
            ("a", 16, None, 60.0),
            ("b", 8, 10.0, 30.0),
            ("mean", 8, 45.0, 65.0),
            ("mean", 16, None, 60.0),
        ]

    @pytest.mark.parametrize("setting", [{"seed": 1}, {"samples": 2}, {"text": "sha256:0"}, {"chat_template": True}])
    def test_other_prompts_do_not_compare(self, setting):
        with pytest.raises(ValueError, match=next(iter(setting))):
            compare(summary([]), summary([], **setting))


def test_a_heat_map_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    cells = summary([("a", length, depth, 50.0) for length in (8, 16) for depth in (0.0, 1.0)])["cells"]
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        draw_heat_map(cells, tmp_path / f"map{suffix}", "model")
        assert (tmp_path / f"map{suffix}").read_bytes().startswith(start)
    with pytest.raises(ValueError, match="ending must be one of"):
        draw_heat_map(cells, tmp_path / "map.bmp", "model")
    with pytest.raises(ValueError, match="no scores"):
        draw_heat_map([], tmp_path / "map.png", "model")

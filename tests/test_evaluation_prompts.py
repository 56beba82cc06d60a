"""Prompts: of exactly the length asked for, needle present, answer unique, the same bytes from the same seed."""

import hashlib
import re
from random import Random

import pytest
from small_tokenizers import KINDS, tokenizer_of

from gated_qwen.evaluation.exact_length import PromptEncoder, TooShort, fit
from gated_qwen.evaluation.haystack import Haystack, hide
from gated_qwen.evaluation.tasks import TASKS, make_sample
from gated_qwen.evaluation.vocabulary import numbers
from gated_qwen.evaluation.word_lists import FEWEST_CODED_WORDS, rank_counts

CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return tokenizer_of(request.param)


def least_length(task, tokenizer, **options):
    with pytest.raises(ValueError, match=r"the least is \d+ tokens") as refusal:
        make_sample(task, tokenizer, 1, **options)
    return int(re.search(r"the least is (\d+) tokens", str(refusal.value)).group(1))


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_has_exactly_the_tokens_asked_for(task, tokenizer):
    least = least_length(task, tokenizer)
    for length in (*range(least, least + 12), least + 100, 2 * least, 6000):
        sample = make_sample(task, tokenizer, length)
        assert len(sample.input_ids) == length - TASKS[task].max_new_tokens
        assert sample.input_ids == tokenizer(sample.prompt)["input_ids"]


@pytest.mark.parametrize("task", TASKS)
def test_every_length_below_the_least_is_refused_with_the_least(task):
    tokenizer = tokenizer_of("byte-level BPE")
    least = least_length(task, tokenizer)
    for length in (-5, 0, TASKS[task].max_new_tokens, least - 1):
        with pytest.raises(ValueError, match=f"{task}: length {length} is too small; the least is {least} tokens"):
            make_sample(task, tokenizer, length)


@pytest.mark.parametrize("task", TASKS)
def test_the_answers_are_in_the_prompt_and_unique(task, tokenizer):
    for index in range(3):
        sample = make_sample(task, tokenizer, 2500, index=index)
        assert len(set(sample.answers)) == len(sample.answers)
        counts = [len(re.findall(rf"\b{answer}\b", sample.prompt)) for answer in sample.answers]
        if task.startswith("niah"):
            assert counts == [1] * len(counts)
            assert sum(value.isdigit() and len(value) == 7 for value in re.findall(r"\w+", sample.prompt)) == (
                1 if task == "niah_single" else 4
            )
        elif task == "variable_tracking":
            assert counts == [2, 2, 2, 2, 1]  # defined, and passed on but for the last
            value = re.search(r"hold the value (\d+)", sample.prompt).group(1)
            names, held = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.prompt)), []
            for name, source in names.items():  # the statements are in order, so each source is known by then
                if source == value or source in held:
                    held.append(name)
            assert tuple(held) == sample.answers
        else:
            words = re.findall(r"\b[a-z]{6}\b", sample.prompt.split("\n\n")[1])
            others = set(words) - set(sample.answers)
            assert min(counts) > max((words.count(word) for word in others), default=0)


def test_frequent_words_have_no_ties_at_any_length():
    for total in (*range(FEWEST_CODED_WORDS, 600), 10_000, 1_000_001):
        second, third, fourth, fifth, *_ = rank_counts(total)
        assert second > third > fourth > fifth > 0 and sum(rank_counts(total)) < total


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.takes_depth])
def test_the_needle_lies_at_its_depth(task, depth):
    tokenizer = tokenizer_of("byte-level BPE")
    sample = make_sample(task, tokenizer, 4096, depth=depth)
    context = sample.prompt.split("\n\n")[1]
    before, after = context.split(f"is {sample.answers[0]}.")
    assert abs(len(before) / (len(before) + len(after)) - depth) < 0.02
    if depth in (0.0, 1.0) and task == "niah_single":
        assert context.startswith("The secret") if depth == 0.0 else context.endswith(f"{sample.answers[0]}.")


def test_a_needle_in_a_text_file(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"This is line {i}, which says  {7 * i % 31}. Who reads it?" for i in range(500)))
    haystack = Haystack.from_file(path)
    sample = make_sample("niah_single", tokenizer, 5000, depth=0.5, haystack=haystack)
    assert len(sample.input_ids) == 5000 - 128
    before, after = sample.prompt.split(f"is {sample.answers[0]}. ")
    assert re.search(r"[.?] The secret number for [\w-]+ $", before) and re.match(r"(This|Who) ", after)
    assert "which says 7. Who" in sample.prompt


@pytest.mark.parametrize(
    "content", ["─" * 5000 + " word", "漢字かな交じり文。" * 600, "https://example.org/" + "path/" * 900, "a"]
)
def test_any_text_makes_a_haystack(content, tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text(content)
    haystack = Haystack.from_file(tmp_path / "text.txt")
    assert all(0 < len(word) <= 32 and "─" not in word for word in haystack.words)
    for length in (1500, 1501, 1502):
        sample = make_sample("niah_multikey", tokenizer, length, haystack=haystack)
        assert len(sample.input_ids) == length - 128 and sample.answers[0] in sample.prompt


def test_answers_do_not_occur_in_the_text_that_they_are_hidden_in():
    all_but_one = " ".join(str(number) for number in range(10, 100) if number != 54)
    drawn = numbers(Random(0), all_but_one, digits=2)
    assert next(drawn) == "54"
    with pytest.raises(ValueError, match="were taken or stand in the text"):
        next(drawn)


def test_the_same_seed_gives_the_same_bytes_on_every_machine():
    tokenizer = tokenizer_of("byte-level BPE")
    prompts = [make_sample(task, tokenizer, 1500, seed=7).prompt for task in TASKS]
    assert prompts == [make_sample(task, tokenizer, 1500, seed=7).prompt for task in TASKS]
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    assert digest == "1e2ecd079b9d5b2ee0ffd26ee7a60767d5da9294513472e88d39aa66d8c30a4a"


def test_another_seed_or_index_gives_another_prompt():
    tokenizer = tokenizer_of("byte-level BPE")
    for task in TASKS:
        samples = [make_sample(task, tokenizer, 1500, seed=seed, index=i) for seed, i in ((0, 0), (1, 0), (0, 1))]
        assert len({sample.answers for sample in samples}) == 3


def test_a_chat_template_is_counted_and_its_bos_comes_once():
    tokenizer = tokenizer_of("Unigram")
    tokenizer.chat_template = CHAT
    try:
        sample = make_sample("niah_single", PromptEncoder(tokenizer, chat_template=True), 1200)
    finally:
        tokenizer.chat_template = None
    assert len(sample.input_ids) == 1200 - 128
    assert sample.input_ids[0] == tokenizer.bos_token_id != sample.input_ids[1]
    assert sample.prompt.startswith("<s>user: ") and "assistant: The secret number for" in sample.prompt


def test_a_tokenizer_without_a_chat_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        PromptEncoder(tokenizer_of("WordPiece"), chat_template=True)


def test_a_tokenizer_that_cuts_does_not_cut_prompts():
    tokenizer = tokenizer_of("WordPiece")
    tokenizer.model_max_length = 64
    tokenizer.backend_tokenizer.enable_truncation(64)
    try:
        assert len(make_sample("niah_single", tokenizer, 1000).input_ids) == 1000 - 128
    finally:
        tokenizer.model_max_length = 10**30
        tokenizer.backend_tokenizer.no_truncation()


def test_the_search_ends_when_filler_adds_no_tokens():
    """A tokenizer that fuses unknown words into one token."""

    def encode(text):
        return ["?"] * 5

    with pytest.raises(ValueError, match="no prompt of exactly 9 tokens"):
        fit(lambda words, pad: "word " * words + pad, encode, 9)
    with pytest.raises(TooShort, match="at least 5"):
        fit(lambda words, pad: "word " * words + pad, encode, 4)


def test_the_search_ends_with_words_of_many_tokens():
    text, ids = fit(lambda words, pad: "begin" + " word" * words + pad, list, 1003)
    assert len(ids) == len(text) == 1003


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("niah", {}, "task 'niah' is not known; choose from niah_single"),
        ("common_words", {"depth": 0.5}, "give no depth"),
        ("niah_single", {"depth": 1.5}, "depth 1.5"),
    ],
)
def test_wrong_arguments_are_named(task, options, message):
    with pytest.raises(ValueError, match=message):
        make_sample(task, tokenizer_of("WordPiece"), 1000, **options)


@pytest.mark.parametrize(("content", "message"), [(b" \n", "no words"), (b"caf\xe9", "not UTF-8 text .byte 3.")])
def test_a_text_that_is_none_is_refused(content, message, tmp_path):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Haystack.from_file(tmp_path / "text.txt")


def test_sentences_at_one_place_keep_their_order_and_a_pad_ends_the_filler():
    words = "It rains. It pours.".split()
    assert hide(["A.", "B.", "C."], [0.5, 0.5, 1.0], words, " .") == "It rains. A. B. It pours. . C."
    assert hide(["A."], [0.3], [], " .") == "A. ."

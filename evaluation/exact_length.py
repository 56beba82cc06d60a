"""Prompts of an exact number of tokens, with any tokenizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Short texts that end the filler where a whole word is too long; tried in this order until the count is right.
PAD_UNITS = (" .", " -", ".", "-", " ...", " a", "a", " x", "x", "\n", " ~", "~")
LARGEST_PAD = 10  # tokens
FEWEST_WORDS_FOR_A_RATE = 32  # fewer tell too little about tokens per word
SHRINK_STEPS = 8  # how many words of filler may be given up for a pad


class TooShort(ValueError):
    """The prompt without any filler is longer than wanted; `least` is its length in tokens."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the prompt needs at least {least} tokens")
        self.least = least


@dataclass(frozen=True)
class PromptEncoder:
    """How a question becomes text and token ids.

    Attributes:
        tokenizer: any Hugging Face tokenizer.
        chat_template: wrap the question as a user message with the tokenizer's chat template.
    """

    tokenizer: Any
    chat_template: bool = False

    def __post_init__(self) -> None:
        if self.chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; leave --chat-template out")

    def text(self, question: str, answer_prefix: str) -> str:
        """The prompt: the question, then the first words of the answer, which the model goes on from."""
        if not self.chat_template:
            return f"{question}\n{answer_prefix}"
        message = [{"role": "user", "content": question}]
        wrapped = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return f"{wrapped}{answer_prefix}"

    def ids(self, text: str) -> list[int]:
        """The token ids of a prompt, uncut whatever the tokenizer's maximum; a chat template writes its own BOS."""
        special = not self.chat_template
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"]
        return ids


def fit(build: Callable[[int, str], str], encode: Callable[[str], list[int]], target: int) -> tuple[str, list[int]]:
    """Finds a prompt of exactly `target` tokens.

    The number of filler words is found by secant steps inside a shrinking bracket, so the search ends for every
    tokenizer and length. What is then missing, less than a word as a rule, is made up with a short pad. Every count
    is that of the whole prompt, so tokens that straddle a seam are counted right.

    Args:
        build: takes a number of filler words and a pad, returns the prompt.
        encode: returns the token ids of a text.
        target: tokens.

    Returns:
        The prompt and its `target` token ids.

    Raises:
        TooShort: the prompt without filler has more tokens than `target`.
        ValueError: no filler and pad give this number with this tokenizer.

    Example:
        >>> fit(lambda words, pad: "head" + " word" * words + pad + "\\ntail", str.split, 16)[0]
        'head word word word word word word word word word word word . . .\\ntail'
    """
    least = len(encode(build(0, "")))
    if least > target:
        raise TooShort(least)
    low, low_count = 0, least
    high = ceiling = 8 * target + 64  # filler that adds no tokens, e.g. unknown words fused into one, must end
    guess, tokens_per_word = min(64, target), 1.0
    last, last_count, missing = low, low_count, [target - least]
    while target - low_count > LARGEST_PAD and high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        count = len(encode(build(guess, "")))
        if count <= target:
            low, low_count = guess, count
        else:
            high = guess
        if abs(guess - last) >= FEWEST_WORDS_FOR_A_RATE:
            tokens_per_word = max((count - last_count) / (guess - last), 0.1)
        last, last_count = guess, count
        missing.append(target - count)
        step = round((missing[-1] - LARGEST_PAD // 3) / tokens_per_word)
        guess += min(step, 7 * guess)  # a short prompt costs little and tells the rate better than a few words do
        if high < ceiling and abs(missing[-1]) > abs(missing[-3:][0]) / 2:  # the rate says nothing here, e.g. a table
            guess = (low + high) // 2
    for words in range(low, max(low - SHRINK_STEPS, 0) - 1, -1):
        count = low_count if words == low else len(encode(build(words, "")))
        for pad in _pads(target - count, encode):
            text = build(words, pad)
            ids = encode(text)
            if len(ids) == target:
                return text, ids
    raise ValueError(f"this tokenizer gives no prompt of exactly {target} tokens; try a length a few tokens away")


def _pads(tokens: int, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Yields pads that add `tokens` tokens between two short words; in the prompt it may still be another number."""
    if tokens <= 0:
        yield from [""] * (tokens == 0)
        return
    bare = len(encode("of\nof"))
    runs = (unit * times for unit in PAD_UNITS for times in range(1, 2 * tokens + 1))
    mixtures = (f"{unit * (tokens - 1)}{other}" for unit in PAD_UNITS for other in PAD_UNITS if other != unit)
    for pad in (*runs, *mixtures):
        if len(encode(f"of{pad}\nof")) - bare == tokens:
            yield pad

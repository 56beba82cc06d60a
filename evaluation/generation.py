"""Greedy answers to a batch of prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from gated_qwen.evaluation.scoring import match_all


class AllFound(StoppingCriteria):
    """Ends a row once it contains all its answers: the score cannot rise or fall any more, so the rest is time."""

    def __init__(self, tokenizer: Any, answers: Sequence[Sequence[str]], prompt_tokens: int) -> None:
        self.tokenizer, self.answers, self.prompt_tokens = tokenizer, answers, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = [self.tokenizer.decode(row[self.prompt_tokens :], skip_special_tokens=True) for row in input_ids]
        found = [match_all(text, answers) == 1.0 for text, answers in zip(texts, self.answers, strict=True)]
        return torch.tensor(found, device=input_ids.device)


@torch.no_grad()  # and not inference_mode, in which quanto's 4-bit weights fail
def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop_at: Sequence[Sequence[str]] | None = None,
) -> list[str]:
    """Continues each prompt greedily, whatever sampling or penalties the model's own generation config asks for.

    Shorter prompts are padded on the left and masked, so a prompt's answer does not depend on its neighbours (up to
    rounding). The attention implementation is the one that the model was loaded with.

    Args:
        model: any Hugging Face causal LM, in eval mode.
        tokenizer: its tokenizer.
        prompts: token ids, one list for each prompt.
        max_new_tokens: at most so many tokens for each.
        stop_at: for each prompt, strings after all of which nothing more is written.

    Returns:
        The continuations as text, without special tokens, in the order of `prompts`.
    """
    own = model.generation_config
    end = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = end[0] if isinstance(end, (list, tuple)) else (end or 0)
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    greedy = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=end,
        pad_token_id=pad,
    )
    criteria = StoppingCriteriaList([AllFound(tokenizer, stop_at, longest)] if stop_at else [])
    output = model.generate(
        input_ids=torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(masks, device=model.device),
        generation_config=greedy,
        stopping_criteria=criteria,
    )
    return [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in output]

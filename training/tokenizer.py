"""The tokenizer of a run: one that is there, or a byte-level BPE learned from the training text."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gated_qwen.conversion.folder import atomic_folder
from gated_qwen.training.recipe import TokenizerTraining

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}


def learn_tokenizer(texts: Iterable[str], wanted: TokenizerTraining, folder: Path) -> Any:
    """Learns a byte-level BPE and saves it; the same text gives the same tokenizer.

    Args:
        texts: read until `wanted.characters` of them were seen.
        wanted: its size.
        folder: where it is saved; one that is there already is loaded as it is.

    Returns:
        A Hugging Face tokenizer with BOS, EOS, padding and unknown tokens, which takes text of any length.

    Raises:
        ValueError: the text is too short for so many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not folder.is_dir():
        learned = Tokenizer(models.BPE())
        learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        learned.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=wanted.vocab_size,
            special_tokens=list(SPECIAL.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        learned.train_from_iterator(_first(texts, wanted.characters), trainer)
        if learned.get_vocab_size() < wanted.vocab_size:
            raise ValueError(
                f"tokenizer.train.vocab_size: the text gives only {learned.get_vocab_size()} tokens, "
                f"not {wanted.vocab_size}; ask for fewer, or give more text"
            )
        with atomic_folder(folder) as temporary:
            PreTrainedTokenizerFast(tokenizer_object=learned, **SPECIAL).save_pretrained(temporary)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def load_tokenizer(source: str, revision: str | None, path: str) -> Any:
    """Loads a tokenizer from a folder or a Hub id, without running code of its own.

    Raises:
        ValueError: there is none; it begins with `path`, the recipe's field.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no tokenizer in {source} ({' '.join(str(error).split())})") from error


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return

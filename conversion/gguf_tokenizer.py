"""A Hugging Face tokenizer as GGUF keys: byte-level BPE that llama.cpp tokenizes alike, anything else is refused."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gated_qwen.conversion.families import GatedConfig

# GGUF's token types.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# llama.cpp keeps each pre-tokenizer as code of its own under a name. On the left the steps of the tokenizers library.
PRE_TOKENIZERS = {
    (("Split", QWEN2_PATTERN), ("ByteLevel", "no regex")): "qwen2",  # Qwen2 to Qwen3
    (("Split", QWEN3_5_PATTERN), ("ByteLevel", "no regex")): "qwen35",  # Qwen3.5
    (("ByteLevel", "regex"),): "gpt-2",  # what the tokenizers library trains by default
    (("Digits", "individual"), ("ByteLevel", "regex")): "smollm",
}


def tokenizer_keys(folder: Path, config: "GatedConfig") -> dict[str, Any]:
    """The `tokenizer.*` keys of a tokenizer, its chat template among them.

    Args:
        folder: holds the tokenizer's files.
        config: gives the size of the vocabulary; ids that the tokenizer does not use become unused tokens.

    Returns:
        Key to value: str, int, bool, or a list of str or int.

    Raises:
        ValueError: llama.cpp would tokenize differently, or has no way to say what the tokenizer does; or there is no
            tokenizer in `folder`.
    """
    tokenizer = _load(folder)
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    _check_model(folder, definition)
    tokens, types = _vocabulary(folder, definition, config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in definition["model"]["merges"]]
    character = next((text for text in tokens if len(text) == 1 and text.isascii()), "a")
    begins, ends = _added_around(folder, tokenizer, character)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer_name(folder, definition["pre_tokenizer"]),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **_special_ids(folder, tokenizer, config),
        "tokenizer.ggml.add_bos_token": begins,
        "tokenizer.ggml.add_eos_token": ends,
        **_chat_templates(tokenizer.chat_template),
    }


def _load(folder: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    import gated_qwen  # noqa: F401  makes our model type known, so that no code is asked for

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizer libraries raise whatever comes
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder}: no tokenizer that can be read ({reason}); restore its files, or write the model without one"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{folder}: the tokenizer has no tokenizer.json; save it once as a fast tokenizer")
    return tokenizer


def _refuse(folder: Path, what: str) -> None:
    raise ValueError(
        f"{folder}: GGUF cannot hold this tokenizer: {what}; use another tokenizer, or write the model without one"
    )


def pre_tokenizer_name(folder: Path, pre_tokenizer: dict[str, Any] | None) -> str:
    """llama.cpp's name of a pre-tokenizer, by its steps.

    Raises:
        ValueError: it is none of `PRE_TOKENIZERS`; an unknown one would split text differently without an error.

    Example:
        >>> pre_tokenizer_name(Path("model"), {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True})
        'gpt-2'
    """
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    name = PRE_TOKENIZERS.get(tuple(_step(step) for step in steps))
    if name is None:
        _refuse(folder, f"no pre-tokenizer of llama.cpp is known to split text like {pre_tokenizer}")
    assert name is not None
    return name


def _step(step: dict[str, Any]) -> tuple[str, str]:
    """A step as `PRE_TOKENIZERS` writes it; one that is set otherwise than there comes out as itself, unknown."""
    settings = {name: value for name, value in step.items() if name not in ("type", "trim_offsets")}
    kind = step["type"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return kind, "regex" if step.get("use_regex", True) else "no regex"
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return kind, step["pattern"]["Regex"]
    if kind == "Digits" and step["individual_digits"]:
        return kind, "individual"
    return kind, str(settings)


def _check_model(folder: Path, definition: dict[str, Any]) -> None:
    model, normalizer = definition["model"], definition["normalizer"]
    if model["type"] != "BPE":
        _refuse(folder, f"its model is {model['type']}, not byte-level BPE")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(setting):
            _refuse(folder, f"its BPE sets {setting}={model[setting]!r}")
    # NFC is what Qwen has. llama.cpp does not normalise, so text that is not in NFC already gives other ids there.
    if normalizer is not None and normalizer != {"type": "NFC"}:
        _refuse(folder, f"its normalizer is {normalizer}, where none or NFC is expected")
    for token in definition["added_tokens"]:
        if odd := [name for name in ("single_word", "lstrip", "rstrip") if token[name]]:
            _refuse(folder, f"its token {token['content']!r} sets {odd[0]}")


def _vocabulary(folder: Path, definition: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all `size` tokens; added tokens are matched in text, special ones are control tokens."""
    by_id = {number: (text, NORMAL) for text, number in definition["model"]["vocab"].items()}
    for token in definition["added_tokens"]:
        by_id[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
    if max(by_id) >= size:
        text = by_id[max(by_id)][0]
        raise ValueError(
            f"{folder}: token {text!r} has id {max(by_id)}, but the model's vocab_size is {size}; "
            "this tokenizer belongs to another model"
        )
    entries = [by_id.get(number, (f"[PAD{number}]", UNUSED)) for number in range(size)]
    return [text for text, _ in entries], [kind for _, kind in entries]


def _added_around(folder: Path, tokenizer: "PreTrainedTokenizerFast", text: str) -> tuple[bool, bool]:
    """Whether the tokenizer puts its begin token before, and its end token after, a text."""
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text)["input_ids"]
    for begins in (False, True):
        for ends in (False, True):
            if whole == [tokenizer.bos_token_id] * begins + bare + [tokenizer.eos_token_id] * ends:
                return begins, ends
    _refuse(folder, "it puts other tokens around a text than its begin and end tokens")
    raise AssertionError


def _special_ids(folder: Path, tokenizer: "PreTrainedTokenizerFast", config: "GatedConfig") -> dict[str, int]:
    end = _first_id(tokenizer.eos_token_id, config.eos_token_id)
    if end is None:
        _refuse(folder, "it names no eos_token, and llama.cpp would end every text at token 11")
    begin = _first_id(tokenizer.bos_token_id, config.bos_token_id, end)  # unnamed, llama.cpp would take token 11
    ids = {
        "bos": begin,
        "eos": end,
        "eot": _second_end(folder, end),
        "padding": _first_id(tokenizer.pad_token_id),
        "unknown": _first_id(tokenizer.unk_token_id),
    }
    return {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None}


def _first_id(*candidates: int | list[int] | None) -> int | None:
    for candidate in candidates:
        if isinstance(candidate, list):
            candidate = candidate[0] if candidate else None
        if candidate is not None:
            return candidate
    return None


def _second_end(folder: Path, end: int | None) -> int | None:
    """Another token at which the generation config ends a text, e.g. Qwen's end of text beside its end of turn."""
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    return next((number for number in ends if number != end), None) if isinstance(ends, list) else None


def _chat_templates(template: str | dict[str, str] | None) -> dict[str, Any]:
    if not template:
        return {}
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = {f"tokenizer.chat_template.{name}": text for name, text in template.items() if name != "default"}
    keys: dict[str, Any] = {
        "tokenizer.chat_templates": sorted(name for name in template if name != "default"),
        **named,
    }
    if "default" in template:
        keys["tokenizer.chat_template"] = template["default"]
    return keys

"""A model folder that is fit to be published, and the local Hub as the client in this process sees it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import TOKEN, LocalHub
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gated_qwen.model_cards.checks import check_publication

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags:
- gated-attention
---

# A tiny model
"""


def word_tokenizer(size: int = 64) -> PreTrainedTokenizerFast:
    """Each token is a word: w0, w1 and so on."""
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")


def publishable_folder(folder: Path, model: PreTrainedModel | None = None, card: str = CARD, **save: object) -> Path:
    """Writes a tiny model with its tokenizer and a card; `save` goes to save_pretrained."""
    (tiny_model(gate_granularity="headwise", pad_token_id=0) if model is None else model).save_pretrained(
        folder, **save
    )
    word_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(card)
    return folder


def refusal(folder: Path, **options: object) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(ValueError) as error:
        check_publication(folder, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


@contextmanager
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A local Hub, which the client in this process takes for the Hub, logged in with a token that may write.

    Its settings are read from the environment once, long before a test can set them, so they are set in its module.
    """
    from huggingface_hub import close_session, constants

    with LocalHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        files = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # made once for an endpoint
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        close_session()
        yield hub
        close_session()

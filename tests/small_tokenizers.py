"""Three tokenizers as different as they come, built here: byte-level BPE, Unigram and WordPiece."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from gated_qwen.evaluation.haystack import NOISE
from gated_qwen.evaluation.vocabulary import ADJECTIVES, NOUNS

# Enough text to learn from; what it lacks must work all the same.
TEXT = [
    NOISE,
    " ".join(ADJECTIVES),
    " ".join(NOUNS),
    "What is the secret number for 0123456789, according to the text?",
]
KINDS = ("byte-level BPE", "Unigram", "WordPiece")


@cache
def tokenizer_of(kind: str, vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A tokenizer of one of `KINDS`; the Unigram one writes BOS first, the WordPiece one lowers the case."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    trained = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
    if kind == "byte-level BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **trained)
    elif kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **trained)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**trained)
    tokenizer.train_from_iterator(TEXT, trainer)
    if kind == "Unigram":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )

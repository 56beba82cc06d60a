"""A small gated model with q/k norm and its tokenizer, trained for a few seconds on the sources of Python's library.

Trained, since at the start norms are ones and gates are near one half: a norm or a gate that is left out, or that lies
in the wrong rows, would hardly show. 1 < K < H, since with K = 1 or K = H a wrong split of heads passes unseen.
"""

import os
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM
from gated_qwen.conversion.gguf_tokenizer import QWEN2_PATTERN, QWEN3_5_PATTERN

SOURCES = ("argparse.py", "ast.py", "calendar.py", "cmd.py", "configparser.py", "difflib.py", "inspect.py", "pdb.py")
HELD_OUT = "textwrap.py"
VOCAB = 640  # of which the tokenizer uses 600

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def split(pattern):
    """Splits by a pattern, then maps bytes to characters, as Qwen's tokenizers do."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


PRE_TOKENIZERS = {
    "qwen2": split(QWEN2_PATTERN),
    "qwen35": split(QWEN3_5_PATTERN),
    "gpt-2": pre_tokenizers.ByteLevel(False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
}


def library_text(name):
    """The source of a module of Python's library, the first 40,000 characters."""
    return Path(os.__file__).with_name(name).read_text(encoding="utf-8")[:40000]


@cache
def small_tokenizer(pre="qwen2"):
    """A byte-level BPE of 600 tokens whose pre-tokenizer llama.cpp knows as `pre`, with Qwen's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if pre.startswith("qwen") else None
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=598,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([library_text(name) for name in SOURCES], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@cache
def trained_model(granularity, tied, steps=60):
    """A gated model in fp32 and eval mode after `steps` steps; 4 query heads, 2 key/value heads, 2 layers."""
    torch.manual_seed(0)
    config = GatedQwenConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        gate_granularity=granularity,
        eos_token_id=2,
    )
    model = GatedQwenForCausalLM(config).train()
    text = torch.cat([torch.tensor(small_tokenizer()(library_text(name))["input_ids"]) for name in SOURCES])
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.Adam([{"params": norms, "lr": 2e-2}, {"params": others, "lr": 5e-3}])
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 96, (8,))
        batch = torch.stack([text[start : start + 96] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@cache
def prefixes(count=10):
    """Token ids of the first 5, 17, 29, ... tokens of a file that the model was not trained on."""
    ids = small_tokenizer()(library_text(HELD_OUT))["input_ids"]
    return [ids[: 5 + 12 * i] for i in range(count)]

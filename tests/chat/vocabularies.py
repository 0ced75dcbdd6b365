"""A small byte-level vocabulary, trained here, in each form that files have."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from civetta.chat.vocabulary import SPLIT_PATTERN

if TYPE_CHECKING:
    from pathlib import Path

CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
SHOWN = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
]  # fmt: skip
PADDING = 5
TEXTS = [
    "The quick brown fox doesn't jump over 1234 lazy dogs; they're asleep, I'd say.\n\n",
    "Größe, façade, naïve, e\u0301te\u0301, Ångström; привет мир, как дела?\r\n",
    "日本語のテキスト、中文的句子。한국어 문장도 있다. हिन्दी में लिखा हुआ। שָׁלוֹם\n",
    "    def f(x):\n        return x ** 2  # 🙂👩‍👩‍👧 \t\tend   \n",
]


@functools.cache
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of ordinary tokens only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def added_entries() -> list[dict[str, object]]:
    """The added tokens as tokenizer.json lists them, ids after the ordinary ones."""
    base = len(trained()[0])
    return [
        {
            "id": base + offset,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text in CONTROL,
        }
        for offset, text in enumerate(CONTROL + SHOWN)
    ]


def tokenizer_json() -> dict[str, object]:
    """The content of a tokenizer.json."""
    vocab, merges = trained()
    return {
        "added_tokens": added_entries(),
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(merge) for merge in merges]},
    }


def write_folder(folder: Path) -> Path:
    """A Hugging Face folder with the tokenizer's files."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gguf_metadata() -> dict[str, object]:
    """The same vocabulary as GGUF metadata, with padding ids at the end."""
    vocab, merges = trained()
    tokens = sorted(vocab, key=vocab.__getitem__)
    pads = [f"[PAD{len(tokens) + index}]" for index in range(PADDING)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens + CONTROL + SHOWN + pads,
        "tokenizer.ggml.token_type": [1] * len(tokens)
        + [3] * len(CONTROL)
        + [4] * len(SHOWN)
        + [5] * PADDING,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": len(tokens) + CONTROL.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": len(tokens),
    }

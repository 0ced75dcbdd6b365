"""Trains the nano tokenizer on the generators' own text; always gives the same file.

`python -m training.tokenizer.train` writes tokenizer.json and tokenizer_config.json to `nano/`.
The form is that of the real model's tokenizer (model.md A.9): NFC, one split pattern, byte level,
no prefix space; the special tokens come last.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from training.data import lexicon, values
from training.data.abilities import ABILITIES
from training.data.draw import Draw, seeded
from training.data.render import render_text
from training.data.sample import Document

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "nano"
VOCABULARY = 6144
CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REPEATS = 100
SAMPLES = {"stories": 2500, "definitions": 1500, "tools": 1500, "json": 1500, "copy": 2500,
           "retrieval": 600, "arithmetic": 500, "chat": 800, "vision": 300}  # fmt: skip


def corpus(scale: float = 1.0) -> Iterator[str]:
    """Yield the training text: samples of every ability, and the word lists in all spellings."""
    for ability, count in SAMPLES.items():
        for index in range(int(count * scale)):
            draw = Draw(rng=seeded("tokenizer", ability, index), room=1400)
            item = ABILITIES[ability](draw)
            yield item.text if isinstance(item, Document) else render_text(item)
    common = lexicon.words()
    known = (*common[: values.FIRST_WORDS], *lexicon.first_names())
    for kind in ("verbs", "nouns"):
        known += lexicon.choices("tool_parts", kind)
    known += lexicon.choices("places", "cities")
    # Repeated so that each word is one token after a space, and the first ones also without, as
    # they stand after a quote or at the start of a line.
    for word in dict.fromkeys((*known, *common)):
        yield f" {word}" * REPEATS
    for word in dict.fromkeys(known):
        yield "\n".join([word] * REPEATS)


def train(scale: float = 1.0, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train the tokenizer; `vocabulary` counts the special tokens too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = CONTROL + MARKUP
    trainer = BpeTrainer(
        vocab_size=vocabulary - len(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = (_without_specials(text) for text in corpus(scale))
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKUP])
    return tokenizer


def _without_specials(text: str) -> str:
    for token in CONTROL + MARKUP:
        text = text.replace(token, "\n")
    # `=get` would become a token of its own; kept apart, a call copies the very tokens of the
    # declaration.
    return text.replace("=", "=\n")


def config(tokenizer: Tokenizer) -> dict[str, object]:
    """Return tokenizer_config.json: the class and special tokens as the real model names them."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in CONTROL,
        }
        for token in CONTROL + MARKUP
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 16384,
        "split_special_tokens": False,
        "additional_special_tokens": list(CONTROL[1:]),
        "added_tokens_decoder": added,
    }


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(arguments.out / "tokenizer.json"), pretty=False)
    text = json.dumps(config(tokenizer), indent=2, ensure_ascii=False)
    (arguments.out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens written to {arguments.out.name}")


if __name__ == "__main__":
    main()

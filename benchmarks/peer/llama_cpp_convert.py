"""Run llama.cpp's own converter on one folder; a child process of llama_cpp.py.

Two things are set from outside the converter, and nothing in it is edited:

- the tokenizer of a random checkpoint has no known fingerprint, so its pre-tokenizer is named
  `qwen35`, which the release's own tokenizer is given;
- with `--raw-config` the config reaches the converter as the release writes it, with the word
  `full_attention`. Read through transformers (or from a folder that transformers saved) the word
  is `indexed_attention`, and the converter then writes `attention.compress_ratios` of zero.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="source folder of llama.cpp")
    parser.add_argument("--raw-config", action="store_true")
    parser.add_argument("--fuse", action="store_true", help="gate and up experts in one tensor")
    parser.add_argument("--type", choices=("f32", "bf16", "q8_0"), required=True)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    # The converter's own folders go first: its gguf-py knows names that the released gguf does not.
    sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    import convert_hf_to_gguf as converter
    from conversion.base import ModelBase, TextModel

    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "qwen35"
    if args.raw_config:
        ModelBase.load_hparams = staticmethod(_raw_config)
    sys.argv = ["convert", str(args.model), "--outtype", args.type, "--outfile", str(args.out)]
    sys.argv += ["--fuse-gate-up-exps"] if args.fuse else []
    converter.main()


def _raw_config(folder: Path, _mistral: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    text = config.get("text_config", config)
    words = text["layer_types"]
    text["layer_types"] = ["full_attention" if w == "indexed_attention" else w for w in words]
    return config


if __name__ == "__main__":
    main()

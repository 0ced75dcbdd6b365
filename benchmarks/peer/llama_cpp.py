"""Peer check: one checkpoint through transformers, civetta and llama.cpp, logits compared.

A tiny random checkpoint is saved by transformers, converted by llama.cpp's converter to F32, BF16
and Q8_0, and the logits of every position are compared. Run with civetta, transformers, gguf and
tokenizers installed, a C++ compiler, and llama.cpp's source and its shared libraries:

    python benchmarks/peer/llama_cpp.py --llama-cpp SOURCE_DIR --llama-cpp-lib DIR
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from peer_checkpoint import (
    BUDGET,
    RATIO,
    VOCAB,
    random_model,
    round_as,
    save,
    token_ids,
    transformers_logits,
)
from peer_selection import stable_topk, tied_positions, with_filler

from civetta.model.build import load_trunk

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).parent
TYPES = ("f32", "bf16", "q8_0")
# Blocks kept by score, plus a tail of up to RATIO - 1 tokens: up to here every token is attended.
DENSE_TOKENS = BUDGET + RATIO - 1


class Peer:
    """llama.cpp's converter and library; every product goes below `work`."""

    def __init__(self, source: Path, libraries: Path, work: Path) -> None:
        self.source, self.work, self.program = source, work, work / "logits"
        flags = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}", f"-L{libraries}"]
        flags += [f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}"]
        build = ["c++", "-O1", "-std=c++17", str(HERE / "logits.cpp"), *flags]
        _run([*build, "-lllama", "-lggml", "-lggml-base", "-o", str(self.program)])

    def convert(self, model: Path, kind: str, *, raw_config: bool = True) -> Path:
        out = self.work / f"{model.name}-{kind}{'' if raw_config else '-as-saved'}.gguf"
        command = [sys.executable, str(HERE / "llama_cpp_convert.py"), "--type", kind]
        command += ["--llama-cpp", str(self.source), str(model), str(out)]
        _run([*command, *(["--raw-config"] if raw_config else [])])
        return out

    def logits(self, file: Path, ids: list[int], launch_tokens: int | None = None) -> torch.Tensor:
        """float32 [T, vocab], the batch cut into launches of `launch_tokens`."""
        source, out = self.work / "ids.i32", self.work / "out.f32"
        np.array(ids, dtype=np.int32).tofile(source)
        extra = [] if launch_tokens is None else [str(launch_tokens)]
        _run([str(self.program), str(file), str(source), str(out), *extra])
        return torch.from_numpy(np.fromfile(out, dtype=np.float32).reshape(len(ids), VOCAB))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} failed:\n{done.stderr[-4000:]}")


def civetta_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """float32 [T, vocab] of civetta on a folder or a GGUF file."""
    trunk = load_trunk(path)
    with_room = (len(ids) + 63) // 64 * 64
    session = trunk.store(sessions=1, context_tokens=with_room).open()
    return trunk.forward(session, ids, "all").clone()


def ratios(file: Path) -> list[int]:
    """`attention.compress_ratios` as the file states them."""
    field = gguf.GGUFReader(file).fields["qwen4exp.attention.compress_ratios"]
    return [int(field.parts[i][0]) for i in field.data]


def row(name: str, got: torch.Tensor, want: torch.Tensor, *, without: Iterable[int] = ()) -> None:
    """One table row: positions up to the budget, then the ones past it, some left out."""
    parts = range(DENSE_TOKENS), set(range(DENSE_TOKENS, len(want))) - set(without)
    print(f"| {name} | " + " | ".join(_cell(got, want, part) for part in parts) + " |", flush=True)


def _cell(got: torch.Tensor, want: torch.Tensor, positions: Iterable[int]) -> str:
    at = torch.tensor(sorted(positions))
    g, w = got[at], want[at]
    error = (g - w).norm(dim=-1) / w.norm(dim=-1)
    same = int((g.argmax(-1) == w.argmax(-1)).sum())
    return f"{error.median():.1e} / {error.max():.1e} | {same}/{len(at)}"


def by_tail(got: torch.Tensor, want: torch.Tensor) -> None:
    """Past the budget, by the number of tokens visible to a position modulo the block size."""
    print("\n| visible tokens mod 4 | median / max | top-1 |\n|---|---|---|")
    for tail in range(RATIO):
        positions = [p for p in range(DENSE_TOKENS, len(want)) if (p + 1) % RATIO == tail]
        print(f"| {tail} | {_cell(got, want, positions)} |")


def check(form: str, peer: Peer, ids: list[int], seed: int) -> None:
    """All comparisons of one checkpoint form."""
    print(f"\n## {form}\n\n| got vs wanted | to {DENSE_TOKENS}: median / max | top-1 "
          "| past it: median / max | top-1 |\n|---|---|---|---|---|")  # fmt: skip
    model, folder = random_model(form, seed), peer.work / form
    save(model, folder, torch.bfloat16)
    wanted = transformers_logits(model, ids)
    ours = civetta_logits(folder, ids)
    row("civetta safetensors vs transformers", ours, wanted)
    files = {kind: peer.convert(folder, kind) for kind in TYPES}
    civetta = {kind: civetta_logits(file, ids) for kind, file in files.items()}
    llama = {kind: peer.logits(file, ids) for kind, file in files.items()}
    for kind in TYPES:
        row(f"civetta {kind} vs civetta safetensors", civetta[kind], ours)
    for kind in TYPES:
        row(f"llama.cpp {kind} vs civetta {kind}", llama[kind], civetta[kind])
    row("llama.cpp f32 vs transformers", llama["f32"], wanted)
    tied = tied_positions(model, ids)
    filled = with_filler(model, ids, llama["f32"])
    row("llama.cpp f32 vs transformers with filler tokens", llama["f32"], filled)
    row("the same without tied positions", llama["f32"], filled, without=tied)
    row("llama.cpp bf16 vs llama.cpp f32 (same weights)", llama["bf16"], llama["f32"])
    row("llama.cpp f32, launches of 64 vs one", peer.logits(files["f32"], ids, 64), llama["f32"])

    rounded = round_as(model, files["q8_0"])
    twin = peer.work / f"{form}-rounded"
    save(model, twin, torch.float32)
    wanted_q8 = transformers_logits(model, ids)
    twin_f32 = peer.convert(twin, "f32")
    row("civetta q8_0 vs transformers, weights rounded to Q8_0", civetta["q8_0"], wanted_q8)
    twin_llama = peer.logits(twin_f32, ids)
    row("llama.cpp f32 of the rounded weights vs civetta q8_0", twin_llama, civetta["q8_0"])
    row("llama.cpp q8_0 vs llama.cpp f32 of the rounded weights", llama["q8_0"], twin_llama)

    saved = peer.convert(folder, "f32", raw_config=False)
    row("civetta f32, config as saved vs civetta f32", civetta_logits(saved, ids), civetta["f32"])
    row("llama.cpp f32, config as saved vs llama.cpp f32", peer.logits(saved, ids), llama["f32"])
    print(f"\n{rounded} tensors rounded; {len(tied)} tied positions; compress ratios {ratios(files['f32'])} from the raw config, "
          f"{ratios(saved)} from the config as saved.\n\nllama.cpp f32 vs civetta f32 past the "
          "budget:")  # fmt: skip
    by_tail(llama["f32"], civetta["f32"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="source folder of llama.cpp")
    parser.add_argument("--llama-cpp-lib", type=Path, required=True, help="folder of libllama")
    parser.add_argument("--form", choices=("causal", "conditional", "both"), default="both")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    stable_topk()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as work:
        peer = Peer(args.llama_cpp, args.llama_cpp_lib, Path(work))
        ids = token_ids(args.tokens, args.seed)
        for form in ("causal", "conditional") if args.form == "both" else (args.form,):
            check(form, peer, ids, args.seed)


if __name__ == "__main__":
    main()

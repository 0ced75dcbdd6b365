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
# float32 sums in another order; a wrong tensor, row order or selected token gives 1e-2 and more.
TIGHT = 1e-5


class Peer:
    """llama.cpp's converter and library; every product goes below `work`."""

    def __init__(self, source: Path, libraries: Path, work: Path) -> None:
        self.source, self.work, self.program = source, work, work / "logits"
        flags = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}", f"-L{libraries}"]
        flags += [f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}"]
        build = ["c++", "-O1", "-std=c++17", str(HERE / "logits.cpp"), *flags]
        _run([*build, "-lllama", "-lggml", "-lggml-base", "-o", str(self.program)])

    def convert(self, model: Path, kind: str, *flags: str) -> Path:
        """A GGUF of `model`; `flags` are those of llama_cpp_convert.py."""
        out = self.work / f"{'-'.join([model.name, kind, *flags])}.gguf"
        command = [sys.executable, str(HERE / "llama_cpp_convert.py"), "--type", kind, *flags]
        _run([*command, "--llama-cpp", str(self.source), str(model), str(out)])
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


class Report:
    """Prints the table of one checkpoint form and remembers which rows broke their bound."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def head(self, form: str) -> None:
        print(f"\n## {form}\n")
        print(f"| got vs wanted | to {DENSE_TOKENS} tokens: median / max | top-1 ", end="")
        print("| past them: median / max | top-1 | bound |\n|---|---|---|---|---|---|")

    def row(
        self,
        name: str,
        got: torch.Tensor,
        want: torch.Tensor,
        *,
        dense: float | None = None,
        sparse: float | None = None,
        without: Iterable[int] = (),
    ) -> None:
        """One row; `dense` and `sparse` bound the largest error of positions to and past the
        budget, `without` leaves positions past it out."""
        past = set(range(DENSE_TOKENS, len(want))) - set(without)
        cells, bounds = [], []
        for positions, bound in ((range(DENSE_TOKENS), dense), (past, sparse)):
            most, text = compare(got, want, positions)
            cells.append(text)
            bounds.append("-" if bound is None else f"{bound:.0e}")
            if bound is not None and not most <= bound:
                self.broken.append(f"{name}: {most:.1e} is more than {bound:.0e}")
        print(f"| {name} | {' | '.join(cells)} | {', '.join(bounds)} |", flush=True)


def compare(got: torch.Tensor, want: torch.Tensor, positions: Iterable[int]) -> tuple[float, str]:
    """Largest relative error |got - want| / |want| of a position's logits, and both table cells."""
    at = torch.tensor(sorted(positions))
    g, w = got[at], want[at]
    error = (g - w).norm(dim=-1) / w.norm(dim=-1)
    same = int((g.argmax(-1) == w.argmax(-1)).sum())
    return float(error.max()), f"{error.median():.1e} / {error.max():.1e} | {same}/{len(at)}"


def by_tail(got: torch.Tensor, want: torch.Tensor) -> None:
    """Past the budget, by the number of tokens visible to a position modulo the block size."""
    print("\n| visible tokens mod 4 | median / max | top-1 |\n|---|---|---|")
    for tail in range(RATIO):
        positions = [p for p in range(DENSE_TOKENS, len(want)) if (p + 1) % RATIO == tail]
        print(f"| {tail} | {compare(got, want, positions)[1]} |")


def check(form: str, peer: Peer, ids: list[int], seed: int) -> list[str]:
    """All comparisons of one checkpoint form; the bounds that were broken."""
    report = Report()
    report.head(form)
    model, folder = random_model(form, seed), peer.work / form
    save(model, folder, torch.bfloat16)
    wanted = transformers_logits(model, ids)
    ours = civetta_logits(folder, ids)
    report.row("civetta safetensors vs transformers", ours, wanted, dense=TIGHT, sparse=TIGHT)
    files = {kind: peer.convert(folder, kind, "--raw-config") for kind in TYPES}
    civetta = {kind: civetta_logits(file, ids) for kind, file in files.items()}
    llama = {kind: peer.logits(file, ids) for kind, file in files.items()}
    for kind in TYPES:
        tight = None if kind == "q8_0" else TIGHT
        name = f"civetta {kind} vs civetta safetensors"
        report.row(name, civetta[kind], ours, dense=tight, sparse=tight)
    for kind in TYPES:
        tight = TIGHT if kind == "f32" else None
        report.row(f"llama.cpp {kind} vs civetta {kind}", llama[kind], civetta[kind], dense=tight)
    llama_alone(report, peer, model, files, llama, wanted, ids)
    rounded = rounded_weights(report, peer, model, files["q8_0"], civetta, llama, ids)
    fused = civetta_logits(peer.convert(folder, "f32", "--raw-config", "--fuse"), ids)
    report.row("civetta f32, gate and up fused", fused, civetta["f32"], dense=0.0, sparse=0.0)
    saved = peer.convert(folder, "f32")
    again = civetta_logits(saved, ids)
    name = "f32, config as saved vs raw config"
    report.row(f"civetta {name}", again, civetta["f32"], dense=0.0, sparse=0.0)
    report.row(f"llama.cpp {name}", peer.logits(saved, ids), llama["f32"], dense=TIGHT)
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace("indexed_attention", "full_attention"))
    name = "civetta safetensors, full_attention vs indexed_attention"
    report.row(name, civetta_logits(folder, ids), ours, dense=0.0, sparse=0.0)
    print(f"\n{rounded} tensors rounded to Q8_0. Compress ratios: {ratios(files['f32'])} from the")
    print(f"raw config, {ratios(saved)} from the config as saved.")
    print("\nllama.cpp f32 vs civetta f32 past the budget:")
    by_tail(llama["f32"], civetta["f32"])
    return report.broken


def llama_alone(
    report: Report,
    peer: Peer,
    model: torch.nn.Module,
    files: dict[str, Path],
    llama: dict[str, torch.Tensor],
    wanted: torch.Tensor,
    ids: list[int],
) -> None:
    """llama.cpp against transformers, plain and with its own selection, and against itself."""
    f32 = llama["f32"]
    report.row("llama.cpp f32 vs transformers", f32, wanted, dense=TIGHT)
    tied = tied_positions(model, ids)
    filled = with_filler(model, ids, f32)
    report.row("llama.cpp f32 vs transformers with filler tokens", f32, filled, dense=TIGHT)
    name = f"the same without {len(tied)} tied positions"
    report.row(name, f32, filled, dense=TIGHT, sparse=TIGHT, without=tied)
    report.row("llama.cpp bf16 vs llama.cpp f32 (same weights)", llama["bf16"], f32)
    report.row("llama.cpp f32, launches of 64 vs one", peer.logits(files["f32"], ids, 64), f32)


def rounded_weights(
    report: Report,
    peer: Peer,
    model: torch.nn.Module,
    file: Path,
    civetta: dict[str, torch.Tensor],
    llama: dict[str, torch.Tensor],
    ids: list[int],
) -> int:
    """Q8_0 with the format's error taken out: the wanted logits are of the rounded weights."""
    rounded = round_as(model, file)
    twin = peer.work / "rounded"
    save(model, twin, torch.float32)
    name = "civetta q8_0 vs transformers, weights rounded to Q8_0"
    wanted = transformers_logits(model, ids)
    report.row(name, civetta["q8_0"], wanted, dense=TIGHT, sparse=TIGHT)
    f32 = peer.logits(peer.convert(twin, "f32", "--raw-config"), ids)
    name = "llama.cpp f32 of the rounded weights vs civetta q8_0"
    report.row(name, f32, civetta["q8_0"], dense=TIGHT)
    report.row("llama.cpp q8_0 vs llama.cpp f32 of the rounded weights", llama["q8_0"], f32)
    return rounded


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
    broken = []
    for form in ("causal", "conditional") if args.form == "both" else (args.form,):
        with tempfile.TemporaryDirectory() as work:
            peer = Peer(args.llama_cpp.resolve(), args.llama_cpp_lib.resolve(), Path(work))
            broken += check(form, peer, token_ids(args.tokens, args.seed), args.seed)
    if broken:
        raise SystemExit("bounds broken:\n" + "\n".join(broken))
    print("\nevery bound holds")


if __name__ == "__main__":
    main()

"""Compile kernels that read and write the same memory, and say where copies read what was written.

    python tests/kernels/in_place.py

Triton spreads a tensor over a program's threads. Threads that are left over hold copies: they load
what the first holders load, but do not store. Nothing orders the load of a late warp before the
store of another, so a kernel in place that goes on with what it loaded must have no copies of it (or
a barrier between). The layouts are read from the compiled form, for sm_90; no GPU is needed.

Prints JSON: how many launches were compiled, the arguments that copies read too late in the form
that is launched, and those when `enter` has eight warps whatever the width.
"""

import json
import re
from dataclasses import replace
from typing import Any

import torch
from compile_for import F16, F32, Launch, Recorder, compile_launch, for_target, target_of
from triton.runtime.jit import JITFunction
from triton_inputs import Random

from civetta.kernels.fused.launch import ROW_FIELDS, SESSION_FIELDS, Batch
from civetta.kernels.fused.ngram import ngram_layer
from civetta.kernels.fused.streams import Written, enter, settle
from civetta.kernels.matmul.triton import counters
from civetta.kernels.packed import PackedHyper, pack, pack_stack

STREAMS, SLOTS = 4, 2
WIDTHS = (64, 256)
PASSES_ON = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "ttg.convert_layout")
"""Operations whose first operand's memory is that of their result."""


def numbers(layout: str, field: str) -> list[int]:
    found = re.search(rf"{field} = \[([\d, ]+)\]", layout)
    assert found is not None, layout
    return [int(n) for n in found[1].split(",")]


def has_copies(kind: str, layouts: dict[str, str]) -> bool:
    """Whether several threads hold an element of a tensor of pointers (a scalar: all of them)."""
    found = re.match(r"tensor<([\dx]+)x!tt\.ptr<\w+>, (.+)>$", kind)
    if found is None:
        assert kind.startswith("!tt.ptr"), kind
        return True
    shape, name = [int(n) for n in found[1].split("x")], found[2]
    part = re.match(r"#ttg\.slice<\{dim = (\d), parent = (#\w+)\}>", name)
    if part is not None:  # of a layout with one dimension more, along which all hold the same
        shape.insert(int(part[1]), 1)
        name = part[2]
    if name not in layouts:
        return True
    fields = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
    sizes = zip(*(numbers(layouts[name], field) for field in fields), strict=True)
    return any(n < a * b * c for n, (a, b, c) in zip(shape, sizes, strict=True))


def read_too_late(text: str) -> set[str]:
    """Arguments that a program loads with copies and stores to later, no barrier between."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", text, re.MULTILINE))
    signature = re.search(r"tt\.func public @\w+\((.*)", text)
    assert signature is not None
    memory = {name: name[1:] for name in re.findall(r"(%\w+): !tt\.ptr", signature[1])}
    open_loads: set[str] = set()
    late: set[str] = set()
    for line in text.splitlines():
        for inner, outer in re.findall(r"(%[\w#]+) = (%[\w#]+)[,)]", line):  # of a loop
            if outer in memory:
                memory[inner] = memory[outer]
        if re.search(r"\b(?:gpu|ttg)\.\w*barrier", line):
            open_loads.clear()
            continue
        op = re.match(r"\s*(?:(%[\w#]+) = )?(tt[g]?\.\w+) (%[\w#]+)", line)
        if op is None:
            continue
        result, name, first = op.groups()
        where = memory.get(first)
        if where is None:
            continue
        if name in PASSES_ON and result is not None:
            memory[result] = where
        elif name == "tt.load":
            kind = line[line.rindex(" : ") + 3 :]
            if has_copies(kind.split(" loc(")[0].strip(), layouts):
                open_loads.add(where)
        elif name == "tt.store" and where in open_loads:
            late.add(where)
    return late


def launch_streams(width: int, rows: int) -> None:
    """`enter` with nothing to write, with a layer's output, with experts, added up or not."""
    random = Random(0)
    hyper = PackedHyper(
        gain_SD=random.normal(STREAMS, width),
        down=pack(random.normal(16, STREAMS * width), F32, "cpu"),
        up=pack_stack([random.normal(width, 16) for _ in range(STREAMS)], F32, "cpu"),
        inject=random.normal(STREAMS, STREAMS * width),
    )
    x, inject = random.normal(rows, STREAMS, width), random.normal(rows, STREAMS, STREAMS)
    experts = Written(
        y=random.normal(rows, SLOTS, width),
        inject=inject,
        weights_TM=random.uniform(rows, SLOTS),
        shared=random.normal(rows, width),
        shared_mix=random.normal(rows),
    )
    plain = Written(y=random.normal(rows, width), inject=inject)
    for written in (None, plain, experts, settle(experts)):
        enter(x, hyper, 1e-6, F16, written)


def launch_ngram(width: int, rows: int) -> None:
    """The n-gram layer, which adds to the streams in place."""
    random, channels = Random(0), STREAMS * width
    batch = Batch(
        rows_FT=torch.zeros((len(ROW_FIELDS), rows), dtype=torch.int64),
        sessions_FB=torch.zeros((len(SESSION_FIELDS), 1), dtype=torch.int64),
        rows=rows,
        sessions=1,
        most_rows=rows,
        in_place=rows == 1,
        table_tokens=4096,
        counts=counters(torch.device("cpu")),
    )
    gain = random.normal(STREAMS, width)
    ngram_layer(
        batch, random.normal(rows, STREAMS, width), random.normal(rows, channels + width),
        gain, gain, gain, random.normal(channels, 4), 1e-6, dilation=3, place=0, ring=32,
    )  # fmt: skip


def record() -> dict[str, Launch]:
    recorder = Recorder()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        del grid, warmup
        recorder.take(self, args, named)

    real, JITFunction.run = JITFunction.run, run
    try:
        for width in WIDTHS:
            for rows in (1, 100):
                recorder.what = f"{width} columns, {rows} rows"
                launch_streams(width, rows)
        launch_ngram(64, 1)
        launch_ngram(64, 100)
    finally:
        JITFunction.run = real
    return recorder.found


def findings(launches: dict[str, Launch]) -> list[str]:
    """Which launches have copies that read too late: kernel, width, argument."""
    target, found = target_of("cuda:90"), []
    for key, launch in launches.items():
        text = compile_launch(for_target(launch, target), target).asm["ttgir"]
        found += [f"{key.split(') ')[0]}): {name}" for name in sorted(read_too_late(text))]
    return found


def main() -> None:
    launches = {k: v for k, v in record().items() if k.startswith(("enter", "add"))}
    wide = {
        key: replace(launch, options=launch.options | {"num_warps": 8})
        for key, launch in launches.items()
        if key.startswith("enter") and ("(64 " in key or "(256 " in key)
    }
    report = {
        "launches": len(launches),
        "as launched": findings(launches),
        "with eight warps": findings(wide),
    }
    print(json.dumps(report))  # noqa: T201 - a program


if __name__ == "__main__":
    main()

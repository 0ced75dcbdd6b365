"""`civetta bench`: tokens a second of prefill and decoding, and where the time goes.

Rows come in the form of llama-bench. Decoding is greedy. Every row names a hash of what was
generated, so that a faster setting that computes something else is seen.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from civetta.bench.case import RandomModel, check_fits, make_cases
from civetta.bench.texts import TEXTS
from civetta.cli.diagnose import machine_facts
from civetta.cli.loading_bar import LoadingBar
from civetta.cli.options import parse_flags, settings_command
from civetta.errors import UsageError
from civetta.model.mixes import MIXES
from civetta.options import settings_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from civetta.bench.case import Case
    from civetta.bench.run import Options
    from civetta.bench.subject import Subject
    from civetta.bench.table import Writer
    from civetta.options import Settings

RANDOM_LAYERS, RANDOM_NGRAM_BASE = 48, 250_000
FORMATS = ("md", "json", "csv", "jsonl")
OFFERED = (
    # -c is the number of sessions here; a case needs no more context than its own tokens
    *(f"model.{item.name}" for item in settings_of("model") if item.name != "context"),
    "engine.prefill_batch",
    # -d is the depth here; drafts are as many as pay, up to the default of --draft-tokens
    *(f"drafting.{item.name}" for item in settings_of("drafting") if item.name != "draft_tokens"),
)


def whole_numbers(flag: str, low: int, high: int) -> Callable[[str], tuple[int, ...]]:
    """A parser of lists like 1,2,4; raises UsageError."""

    def parse(raw: str) -> tuple[int, ...]:
        words = [word.strip() for word in raw.split(",")]
        if not all(word.isascii() and word.isdigit() and len(word) < 12 for word in words):
            raise UsageError(
                f"{flag} is {raw[:60]!r}: give whole numbers separated by commas, such as {low},"
                f"{low + 1}."
            )
        numbers = [int(word) for word in words]
        for i, number in enumerate(numbers):
            if not low <= number <= high:
                raise UsageError(f"{flag} names {number}: give numbers from {low} to {high}.")
            if number in numbers[:i]:
                raise UsageError(f"{flag} names {number} twice: give it once.")
        return tuple(numbers)

    return parse


def one_number(flag: str, low: int, high: int) -> Callable[[str], int]:
    """A parser of one number; raises UsageError."""
    many = whole_numbers(flag, low, high)

    def parse(raw: str) -> int:
        numbers = many(raw)
        if len(numbers) != 1:
            raise UsageError(f"{flag} is {raw[:60]!r}: give one number.")
        return numbers[0]

    return parse


@click.command(short_help="Measure prefill and decoding.")
@click.option(
    "-p",
    "--prompt",
    "prompts",
    metavar="N,...",
    type=whole_numbers("-p", 0, 1 << 20),
    default="4096",
    help="Prompt tokens of the prefill tests, pp; 0 for none. [4096]",
)
@click.option(
    "-n",
    "--generate",
    "replies",
    metavar="N,...",
    type=whole_numbers("-n", 0, 1 << 20),
    default="32",
    help="Tokens of the decoding tests, tg; 0 for none. [32]",
)
@click.option(
    "-d",
    "--depth",
    "depths",
    metavar="N,...",
    type=whole_numbers("-d", 0, 1 << 20),
    default="0",
    help="Tokens that the context holds before. [0]",
)
@click.option(
    "-c",
    "--sessions",
    "sessions",
    metavar="N,...",
    type=whole_numbers("-c", 1, 256),
    default="1",
    help="Sessions in one batch; rates are of all together. [1]",
)
@click.option(
    "-r",
    "--repetitions",
    metavar="N",
    type=one_number("-r", 1, 10_000),
    default="6",
    help="Timed runs of each test, behind one that warms up. [6]",
)
@click.option(
    "-o",
    "--output",
    "form",
    metavar="FORM",
    default="md",
    help=f"Form of the results: one of {', '.join(FORMATS)}. [md]",
)
@click.option(
    "--vs-args",
    metavar="FLAGS",
    help="Flags of a second setting B, which runs in turn with the first; others are as in A.",
)
@click.option("--phases", is_flag=True, help="Time each part of the network; costs a little speed.")
@click.option("--memory", is_flag=True, help="Watch peak memory and threads.")
@click.option(
    "--profile",
    is_flag=True,
    help="On a GPU: a table of kernels behind the results, with time, bytes, FLOP and their share of"
    " the roofline.",
)
@click.option("--plot", metavar="FILE.svg", help="Draw the rates over depth and sessions.")
@click.option(
    "--seed",
    metavar="N",
    type=one_number("--seed", 0, 1 << 20),
    default="0",
    help="Seed of the token stream. [0]",
)
@click.option(
    "--text",
    metavar="KIND",
    default="random",
    help="Tokens of the stream: random ids, mixed text (prose, code, lists, data), or repetitive text."
    " A reply goes on from the depth, so give -d with a text. [random]",
)
@click.option(
    "--random-weights",
    "mix",
    metavar="TYPES",
    help=f"No model: random weights at the real sizes on a GPU, stored as {', '.join(MIXES)}.",
)
@click.option(
    "--layers",
    metavar="N",
    type=one_number("--layers", 2, 48),
    help=f"Layers of a random model. [{RANDOM_LAYERS}]",
)
@click.option(
    "--ngram-base",
    metavar="N",
    type=one_number("--ngram-base", 61, 20_000_000),
    help="Rows of each of the 16 n-gram tables of a random model; the real one has 20,000,000."
    f" [{RANDOM_NGRAM_BASE}]",
)
@settings_command(*OFFERED)
def bench(
    settings: Settings,
    *,
    mix: str | None,
    layers: int | None,
    ngram_base: int | None,
    prompts: tuple[int, ...],
    replies: tuple[int, ...],
    depths: tuple[int, ...],
    sessions: tuple[int, ...],
    repetitions: int,
    form: str,
    vs_args: str | None,
    phases: bool,
    memory: bool,
    profile: bool,
    plot: str | None,
    seed: int,
    text: str,
) -> int:
    """Measure tokens a second of prefill (pp) and decoding (tg), warmed up, greedy.

    With --speculative, tg cases go through the engine's loop, drafts and all; ids stay the same.
    A session's tokens are a fixed stream, see --text. Exit status 1 when a setting's output
    differs from its own of another repetition or number of sessions.
    """
    if form not in FORMATS:
        raise UsageError(f"-o is {form[:40]!r}: give one of {', '.join(FORMATS)}.")
    if text not in TEXTS:
        raise UsageError(f"--text is {text[:40]!r}: give one of {', '.join(TEXTS)}.")
    if plot is not None and not plot.endswith(".svg"):
        raise UsageError(f"--plot draws SVG and {plot!r} does not end in .svg: name such a file.")
    wanted = _random_model(mix, layers, ngram_base, settings)
    cases = make_cases(prompts, replies, depths, sessions)
    groups = [settings]
    if vs_args is not None:
        groups.append(_changed(settings, vs_args))
    if phases and any(group.drafting.speculative != "off" for group in groups):
        raise UsageError("--phases times the network without drafts: leave --speculative out.")
    if profile:
        _check_profile(form, groups)
    from civetta.bench.run import Options
    from civetta.bench.table import WRITERS

    head = _head(seed, text, vs_args)
    with _opened(plot) as drawing, ExitStack() as held:
        subjects = _load(groups, cases, held, wanted)
        writer = WRITERS[form](lambda text: click.echo(text, nl=False), head)
        options = Options(
            repetitions=repetitions, seed=seed, text=text, phases=phases, memory=memory
        )
        if profile:
            _check_gpu(subjects)
        status = _run(cases, subjects, options, writer, drawing)
        if profile:
            _write_profiles(cases, subjects, options)
        return status


def _check_profile(form: str, groups: list[Settings]) -> None:
    """Raises UsageError for what a kernel table cannot stand beside."""
    if form != "md":
        raise UsageError("--profile writes tables in Markdown: leave -o out.")
    if any(group.drafting.speculative != "off" for group in groups):
        raise UsageError("--profile runs the network without drafts: leave --speculative out.")


def _check_gpu(subjects: list[Subject]) -> None:
    from civetta.bench.kernel_profile import require_gpu

    for subject in subjects:
        require_gpu(subject.trunk.device)


def _write_profiles(cases: tuple[Case, ...], subjects: list[Subject], options: Options) -> None:
    """A kernel table for every case and setting."""
    from civetta.bench.kernel_profile import measured_ceilings
    from civetta.bench.kernel_table import table_text
    from civetta.bench.run import profile

    ceilings = measured_ceilings()
    for case in cases:
        for subject in subjects:
            setting = f", setting {subject.label}" if len(subjects) > 1 else ""
            title = f"{case.name}, {case.sessions} sessions{setting}"
            rows = profile(case, subject, options, ceilings)
            click.echo("\n" + table_text(title, rows, ceilings), nl=False)


def _random_model(
    mix: str | None, layers: int | None, ngram_base: int | None, settings: Settings
) -> RandomModel | None:
    """What --random-weights asks for. Raises UsageError."""
    if mix is None:
        for flag, given in (("--layers", layers), ("--ngram-base", ngram_base)):
            if given is not None:
                raise UsageError(f"{flag} is of a random model: add --random-weights, or drop it.")
        return None
    known = next((one for one in MIXES if one == mix), None)
    if known is None:
        raise UsageError(f"--random-weights is {mix[:40]!r}: give one of {', '.join(MIXES)}.")
    if settings.model.model is not None:
        raise UsageError("--random-weights is a model of its own: leave -m out.")
    return RandomModel(
        mix=known,
        layers=RANDOM_LAYERS if layers is None else layers,
        ngram_base=RANDOM_NGRAM_BASE if ngram_base is None else ngram_base,
    )


def _load(
    groups: list[Settings], cases: tuple[Case, ...], held: ExitStack, wanted: RandomModel | None
) -> list[Subject]:
    """One subject a setting; `held` closes their n-gram tables."""
    from civetta.bench.subject import load_subject, random_subject

    subjects = []
    for label, settings in zip("AB", groups, strict=False):
        if wanted is None:
            with LoadingBar() as bar:
                subjects.append(load_subject(label, settings, progress=bar))
        else:
            subjects.append(random_subject(label, settings, wanted, held))
        held.callback(subjects[-1].trunk.close)
        check_fits(cases, subjects[-1].context_tokens)
    return subjects


def _run(
    cases: tuple[Case, ...],
    subjects: list[Subject],
    options: Options,
    writer: Writer,
    drawing: TextIO | None,
) -> int:
    from civetta.bench.chart import draw
    from civetta.bench.result import Outputs, make_rows
    from civetta.bench.run import measure

    outputs, rows = Outputs(), []
    for case in cases:
        found = make_rows(measure(case, subjects, options), outputs)
        writer.add(found)
        rows += found
    writer.end()
    if drawing is not None:
        drawing.write(draw(rows))
    for difference in outputs.differences:
        click.echo(f"civetta bench: {difference}", err=True)
    return 1 if outputs.contradicted else 0


def _changed(settings: Settings, vs_args: str) -> Settings:
    """Setting B: setting A with other flags. Raises UsageError."""
    flags = parse_flags(vs_args, OFFERED, "--vs-args")
    if not flags:
        raise UsageError("--vs-args is empty: give the flags in which B differs from A.")
    topics = {}
    for topic in ("model", "engine", "drafting"):
        names = {item.name for item in settings_of(topic)}
        own = {name: value for name, value in flags.items() if name in names}
        topics[topic] = replace(getattr(settings, topic), **own)
    return replace(settings, **topics)


def _head(seed: int, text: str, vs_args: str | None) -> dict[str, object]:
    """What all rows have in common."""
    import torch

    names = ("civetta", "system", "machine", "cpu", "cores_usable")
    facts = machine_facts()
    head = {name: facts[name] for name in names} | {"torch": str(torch.__version__)}
    head |= {"seed": seed, "text": text}
    return head if vs_args is None else head | {"setting_b": vs_args}


def _opened(plot: str | None) -> AbstractContextManager[TextIO | None]:
    if plot is None:
        return nullcontext()
    try:
        return Path(plot).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{plot} cannot be written: {error.strerror}.") from error

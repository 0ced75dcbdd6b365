"""`civetta bench`: forms that parse, outputs that agree, wrong flags that are named. No speed."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from api.serving import drafting_always
from civetta.bench import subject
from civetta.bench.case import token_stream
from civetta.bench.phases import PHASES
from civetta.bench.result import FIELDS
from civetta.cli.main import root
from civetta.errors import UsageError
from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCAB = 288
SMALL = ("-p", "66", "-n", "2", "-r", "1", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("bench") / "tiny"))


def run(*args: str) -> str:
    done = CliRunner().invoke(root, ("bench", *args), catch_exceptions=False, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    assert done.return_value == 0
    return done.stdout


def rows(*args: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*args, "-o", "jsonl").splitlines()]


def test_every_test_has_a_row(model: str) -> None:
    found = rows("-m", model, *SMALL, "-d", "0,40", "-c", "1,2")
    assert [(r["test"], r["sessions"]) for r in found] == [
        (f"{test}{depth}", c)
        for depth in ("", " @ d40")
        for test in ("pp66", "tg2")
        for c in (1, 2)
    ]
    for row in found:
        assert row["rate_min"] <= row["rate_median"] <= row["rate_max"]
        assert row["rate_sd"] == 0
        assert row["session_rate"] * row["sessions"] == pytest.approx(row["rate_mean"])
        assert row["tokens"] * row["sessions"] / row["seconds"][0] == pytest.approx(
            row["rate_mean"]
        )
        assert row["depth_reached_by"] == ("prefill once, then forks" if row["depth"] else "")
        assert (row["model"], row["threads"], row["device"]) == ("tiny", 1, "cpu")
        assert row["same_output"]
        assert row["phases_s"] is row["rss_peak_bytes"] is row["ratio_median"] is None


def test_the_hash_is_that_of_the_greedy_tokens(model: str) -> None:
    """Computed here from the trunk itself."""
    import hashlib

    import numpy as np

    found = rows(
        "-m", model, "-p", "70", "-n", "5", "-r", "1", "-d", "40", "--seed", "3", "--threads", "1"
    )
    stream = token_stream(3, 0, 110, VOCAB)
    trunk = load_trunk(model)
    session = trunk.store(sessions=1, context_tokens=110).open()
    last = trunk.forward(session, stream)[0].numpy()
    assert found[0]["ids_sha256"] == hashlib.sha256(np.int64(last.argmax()).tobytes()).hexdigest()
    assert found[0]["logits_sha256"] == hashlib.sha256(last.tobytes()).hexdigest()
    session = trunk.store(sessions=1, context_tokens=110).open()
    trunk.forward(session, stream[:40])
    ids = [stream[40]]
    for _ in range(5):
        ids.append(int(trunk.forward(session, ids[-1:])[0].argmax()))
    expected = np.array(ids[1:], dtype="<i8").tobytes()
    assert found[1]["ids_sha256"] == hashlib.sha256(expected).hexdigest()


def outputs(found: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(r["test"], r["ids_sha256"], r["logits_sha256"]) for r in found}


def test_outputs_do_not_depend_on_settings(model: str) -> None:
    args = ("-m", model, "-p", "100", "-n", "2", "-d", "70", "-r", "1", "--threads", "1")
    base = outputs(rows(*args))
    assert len(base) == 2
    for more in (
        ("--prefill-batch", "64"),
        ("-c", "1,3"),
        ("--phases",),
        ("--memory", "--threads", "2"),
        ("--vs-args", "--prefill-batch 64 --threads 2"),
    ):
        found = rows(*args, *more)
        assert outputs(found) == base
        assert all(row["same_output"] for row in found)
    assert outputs(rows(*args, "--seed", "1")).isdisjoint(base)


def test_two_settings_run_in_turn(model: str) -> None:
    found = rows("-m", model, *SMALL, "-r", "3", "--vs-args", "--prefill-batch=64")
    assert [r["setting"] for r in found] == ["A", "B", "A", "B"]
    assert [r["prefill_batch"] for r in found[:2]] == [found[0]["prefill_batch"], 64]
    for a, b in zip(found[::2], found[1::2], strict=True):
        pairs = [x / y for x, y in zip(a["seconds"], b["seconds"], strict=True)]
        assert b["ratio_median"] == pytest.approx(sorted(pairs)[1])
        assert (b["ratio_min"], b["ratio_max"]) == pytest.approx((min(pairs), max(pairs)))
        assert a["ratio_median"] is None


def test_another_output_is_said(model: str) -> None:
    args = (*SMALL, "-m", model, "-p", "0", "--vs-args", "--dtype bf16", "-o", "json")
    done = CliRunner().invoke(root, ("bench", *args), standalone_mode=False)
    found = json.loads(done.stdout)["rows"]
    assert [row["same_output"] for row in found] == [True, False]
    assert done.stderr.count("\n") == 1
    assert "tg2 with 1 sessions, setting B: the output of session 0 differs" in done.stderr
    assert done.return_value == 0  # two settings may differ; one with itself may not


def test_phases_and_memory(model: str) -> None:
    for row in rows("-m", model, *SMALL, "--phases", "--memory"):
        assert tuple(row["phases_s"]) == PHASES
        assert sum(row["phases_s"].values()) == pytest.approx(row["seconds_mean"])
        assert row["rss_peak_bytes"] > 10 << 20
        assert row["threads_peak"] >= 1
        assert row["device_peak_bytes"] == 0


@pytest.mark.parametrize(
    "more", [(), ("--vs-args", "--prefill-batch 64"), ("--phases", "--memory")]
)
def test_forms_parse_to_the_same_fields(model: str, more: tuple[str, ...]) -> None:
    args = ("-m", model, *SMALL, *more)
    document = json.loads(run(*args, "-o", "json"))
    for row in document["rows"]:
        assert tuple(row) == FIELDS
    assert document["seed"] == 0
    lines = rows(*args)
    assert [r["test"] for r in lines] == [r["test"] for r in document["rows"]]
    head, *body = csv.reader(io.StringIO(run(*args, "-o", "csv")))
    assert set(head) == set(lines[0])
    assert all(len(line) == len(head) for line in body)
    seconds = json.loads(body[0][head.index("seconds")])
    assert len(seconds) == 1
    tables = [t.splitlines() for t in run(*args).strip().split("\n\n")]
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
    assert len(tables[0]) == 2 + len(lines)
    assert len(tables) == {(): 1, "--vs-args": 2, "--phases": 3}[more[0] if more else ()]


def test_a_drawing_is_written(model: str, tmp_path: Path) -> None:
    plot = tmp_path / "rates.svg"
    run("-m", model, *SMALL, "--plot", str(plot))
    found = ElementTree.parse(plot).getroot()
    assert found.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(found.findall(".//{*}circle")) == 2


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round drafts, whatever drafts seem to cost on a machine that is busy."""
    drafting_always(monkeypatch, subject)


@pytest.mark.parametrize("mode", ["mtp", "lookup"])
@pytest.mark.usefixtures("always")
def test_drafts_change_no_token(model: str, mode: str) -> None:
    """Each session's own tokens, at the start and deep in a context, plain and drafted in turn."""
    found = rows(
        *("-m", model, "-p", "0", "-n", "40", "-r", "2", "-d", "0,128", "-c", "1,2"),
        *("--threads", "1", "--vs-args", f"--speculative {mode}"),
    )
    assert [row["speculative"] for row in found] == ["off", mode] * 4
    for plain, drafted in zip(found[::2], found[1::2], strict=True):
        assert plain["ids_sha256"] == drafted["ids_sha256"]
        assert drafted["same_output"]
        assert plain["draft_tokens"] is None
        assert drafted["draft_tokens"] >= drafted["draft_tokens_accepted"] >= 0
        assert drafted["ratio_median"] > 0
    assert sum(row["draft_tokens"] or 0 for row in found) > 0


@pytest.mark.parametrize("text", ["mixed", "repetitive"])
@pytest.mark.usefixtures("always")
def test_texts_are_drafted_and_come_out_the_same(text: str) -> None:
    """The embedded model, whose head is trained: drafts of both kinds of text stand."""
    document = json.loads(
        run(
            *(
                "-p",
                "0",
                "-n",
                "24",
                "-r",
                "1",
                "-d",
                "80",
                "-c",
                "2",
                "--text",
                text,
                "-o",
                "json",
            ),
            *("--threads", "1", "--vs-args", "--speculative mtp"),
        )
    )
    assert document["text"] == text
    plain, drafted = document["rows"]
    assert plain["ids_sha256"] == drafted["ids_sha256"]
    assert drafted["same_output"]
    assert drafted["draft_tokens"] > 0


def test_a_draft_head_goes_on_from_a_full_page(model: str) -> None:
    (row,) = rows(
        "-m", model, "-p", "128", "-n", "0", "-d", "128", "-r", "1", "--speculative", "mtp"
    )
    assert row["same_output"]


def test_drafts_have_a_table_of_their_own(model: str) -> None:
    text = run(
        "-m", model, "-p", "0", "-n", "20", "-r", "1", "--threads", "1", "--speculative", "mtp"
    )
    assert "| test | sessions | drafting | drafts that stood |" in text
    assert "| tg20 | 1 | mtp |" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--phases", "--speculative", "mtp"], "--phases times the network without drafts"),
        (["--phases", "--vs-args", "--speculative lookup"], "--phases times the network without"),
        (["--profile"], "--profile lists a GPU's kernels: add --device cuda"),
        (["--profile", "-o", "json"], "--profile writes tables in Markdown: leave -o out"),
        (["--profile", "--speculative", "mtp"], "--profile runs the network without drafts"),
        (["-p", ""], "-p is '': give whole numbers"),
        (["-p", "1,,2"], "-p is '1,,2'"),
        (["-n", "x"], "-n is 'x'"),
        (["-n", "-1"], "-n is '-1'"),
        (["-d", "0,0"], "-d names 0 twice"),
        (["-c", "0"], "-c names 0: give numbers from 1 to 256"),
        (["-r", "0"], "-r names 0"),
        (["-r", "1,2"], "-r is '1,2': give one number"),
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-o", "xml"], "-o is 'xml': give one of md, json, csv, jsonl"),
        (["-d", "4090"], "pp66 @ d4090 needs a context of 4156 tokens and the model has 4096"),
        (["--vs-args", ""], "--vs-args is empty"),
        (["--vs-args", "--prefill-batch 63"], "--prefill-batch is '63'"),
        (["--vs-args", "--prefix-batch 64"], "--vs-args: No such option"),
        (["--vs-args", "-c 2"], "--vs-args: No such option"),
        (["--vs-args", "--threads"], "--vs-args: Option '--threads' requires an argument"),
        (["--vs-args", "'"], '--vs-args is "\'": No closing quotation'),
        (["--vs-args", "64"], "--vs-args: Got unexpected extra argument"),
        (["--plot", "x.png"], "does not end in .svg"),
        (["--plot", "/nowhere/x.svg"], "cannot be written"),
        (["--prefill-batch", "5"], "--prefill-batch is '5'"),
        (["--seed", "-"], "--seed is '-'"),
        (["--text", "prose"], "--text is 'prose': give one of random, mixed, repetitive"),
    ],
)
def test_wrong_use_is_named(model: str, args: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        run("-m", model, *SMALL, *args)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_wrong_use_ends_with_status_2(civetta: Callable[..., Any], model: str) -> None:
    for args in (("-p", "x"), ("--depths", "1"), ("-d", "5000")):
        done = civetta("bench", "-m", model, *args)
        assert done.status == 2
        assert done.err.count("\n") == 1
        assert done.out == ""


@pytest.mark.parametrize("flags", [("--layers", "4"), ("--ngram-base", "100")])
def test_sizes_of_a_random_model_need_one(flags):
    with pytest.raises(UsageError, match=f"{flags[0]} is of a random model") as raised:
        run(*flags)
    assert "\n" not in raised.value.message

"""A sample of benchmarks/drafting_identity.py on civetta-nano, whose head is trained."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from civetta.model.embedded import embedded_model_path

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def program():
    """The program as a module, found where it lies."""
    sys.path.insert(0, str(PROGRAMS))
    try:
        import drafting_identity
    finally:
        sys.path.remove(str(PROGRAMS))
    return drafting_identity


@pytest.fixture(scope="module")
def identity(program):
    bench = program.Bench(str(embedded_model_path()), threads=1, context=512)
    return program.Identity(bench, tokens=12)


def sampled():
    """Six cells, each value of each axis among them, and prompts of any number."""
    draw = random.Random(5)
    axes = [3, 5, 3]
    orders = [[value for _ in range(3) for value in draw.sample(range(n), n)] for n in axes]
    return [(*(order[i] for order in orders), draw.randrange(199)) for i in range(6)]


def checked(program, identity, sampling, depth, users, first):
    """One slice of two prompts, cold and warm."""
    part = program.Slice(
        list(program.SAMPLINGS)[sampling],
        program.DEPTHS[depth],
        program.USERS[users],
        prompts=range(first, first + 2),
    )
    found = identity.run(part)
    assert found["different"] == []
    assert found["compared_cold"] == found["compared_warm"] == found["hits_warm"] == 2
    assert (found["drafted"] > 0) == (part.depth != "0") or part.depth == "adaptive"
    return found


@pytest.mark.parametrize("cell", sampled())
def test_a_sampled_slice_is_the_same(program, identity, cell):
    checked(program, identity, *cell)


@pytest.mark.parametrize("kind", ["schema", "tools"])
def test_bound_replies_are_the_same(program, identity, kind):
    """Greedy and sampled; the tool requests name a tool, and ask for any."""
    bound = program.Identity(identity.bench, tokens=28, kind=kind)
    for sampling, depth, users in ((0, 3, 1), (2, 2, 0)):
        found = checked(program, bound, sampling, depth, users, first=0)
        assert found["accepted"] > 0


@pytest.mark.parametrize("tokens", [32, 120])
def test_case_46_greedy_text_with_drafts_is_that_without_cold_and_cached(program, identity, tokens):
    """Five prompts, prompts that repeat themselves among them; most drafts of this head stand."""
    bench = identity.bench
    prompts = [0, 5, 8, 12, 13] if tokens == 32 else [1]
    asked = bench.requests(
        [program.PROMPTS[i] for i in prompts], program.SAMPLINGS["greedy"], tokens
    )
    with bench.engine(2, "off") as engine:
        wanted = [ids for ids, _ in program.run_all(engine, asked)]
    with bench.engine(2, "mtp", fixed=True, cache_bytes=1 << 28) as engine:
        for cached in (False, True):
            found = program.run_all(engine, asked)
            assert [ids for ids, _ in found] == wanted
            assert not cached or all(end.usage.cached_tokens > 0 for _, end in found)
        drafted, stood = (
            engine.stats().draft_tokens_total,
            engine.stats().draft_tokens_accepted_total,
        )
    assert stood > drafted / 3 > 0


def test_a_difference_is_told(program, identity):
    """The comparison itself: a reply taken for wanted that is not the one computed."""
    part = program.Slice("greedy", "7", 4, prompts=[5, 1])
    wanted = program.Identity(identity.bench, tokens=12)
    wanted.run(part)
    wanted._alone["greedy", 1][1][3] += 1
    assert wanted.run(part)["different"] == ["1 cold", "1 warm"]


def test_slices_cover_every_cell_once(program):
    parts = list(program.all_slices(200, 10))
    assert len(parts) == len({part.name for part in parts}) == 20 * 3 * 5 * 3
    assert sum(len(part.prompts) for part in parts) == 200 * 45


def test_a_drawn_sample_has_every_cell_alike_and_the_same_again(program):
    """1,440 replies of 36 cells: 20 prompts of each, none twice; a full one is the whole matrix."""
    depths = ("0", "1", "3", "7")
    parts = list(program.drawn_slices(200, 8, depths, 1440, seed=1))
    assert parts == list(program.drawn_slices(200, 8, depths, 1440, seed=1))
    assert len({part.name for part in parts}) == len(parts) == 36 * 3
    cells = {}
    for part in parts:
        cells.setdefault((part.sampling, part.depth, part.users), []).extend(part.prompts)
    assert len(cells) == 36
    assert all(len(own) == len(set(own)) == 20 for own in cells.values())
    assert len({tuple(own) for own in cells.values()}) == 36
    for round_ in range(3):
        some = parts[36 * round_ : 36 * (round_ + 1)]
        assert len({(part.sampling, part.depth, part.users) for part in some}) == 36
    everything = program.drawn_slices(200, 8, depths, 10**6, seed=1)
    assert sum(len(part.prompts) for part in everything) == 200 * 36

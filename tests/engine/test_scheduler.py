from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from civetta.engine.scheduler import Budget, Plan, PrefillChunk, Running, Waiting, plan

ALONE = Budget(sessions=1, prefill_batch=100, prefill_chunk=10)
THREE = Budget(sessions=3, prefill_batch=100, prefill_chunk=10)


def waiting(*keys):
    return [Waiting(key=key, prompt_tokens=5) for key in keys]


def test_nothing_to_do():
    assert plan([], [], ALONE) == Plan()


def test_first_come_first_admitted():
    assert plan(waiting(4, 5, 6), [], ALONE) == Plan(admit=(4,))
    assert plan(waiting(4, 5, 6), [], THREE) == Plan(admit=(4, 5, 6))
    assert plan(waiting(4), [Running(key=1, prompt_left=7)], ALONE).admit == ()


def test_a_lone_prefill_takes_whole_batches():
    assert plan([], [Running(key=1, prompt_left=250)], ALONE).prefill == (
        PrefillChunk(key=1, n_tokens=100),
    )
    assert plan([], [Running(key=1, prompt_left=50)], ALONE).prefill == (
        PrefillChunk(key=1, n_tokens=50),
    )


def test_a_prefill_beside_decoders_takes_small_chunks():
    running = [
        Running(key=1, prompt_left=0),
        Running(key=2, prompt_left=70),
        Running(key=3, prompt_left=70),
    ]
    assert plan([], running, THREE) == Plan(
        decode=(1,), prefill=(PrefillChunk(key=2, n_tokens=10),)
    )


@st.composite
def worlds(draw):
    budget = Budget(
        sessions=draw(st.integers(1, 4)),
        prefill_batch=draw(st.integers(1, 9)),
        prefill_chunk=draw(st.integers(1, 5)),
    )
    jobs = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), max_size=12))
    return budget, jobs


@given(worlds())
def test_everybody_is_served_in_order_and_within_budget(world):
    """Run the plans of whole schedules on paper: nobody starves, no budget is broken."""
    budget, jobs = world
    queue = list(range(len(jobs)))
    prompt_left = {key: prompt for key, (prompt, _) in enumerate(jobs)}
    reply_left = {key: reply for key, (_, reply) in enumerate(jobs)}
    running: list[int] = []
    admitted: list[int] = []
    work = sum(p + r for p, r in jobs)
    for _ in range(work + len(jobs) + 1):
        step = plan(
            [Waiting(key=k, prompt_tokens=prompt_left[k]) for k in queue],
            [Running(key=k, prompt_left=prompt_left[k]) for k in running],
            budget,
        )
        if not queue and not running:
            break
        assert step != Plan(), "work is left and nothing is planned"
        decoders = [k for k in running if prompt_left[k] == 0]
        assert list(step.decode) == decoders  # every due decoder, every step
        prefilled = sum(chunk.n_tokens for chunk in step.prefill)
        assert prefilled <= (budget.prefill_chunk if decoders else budget.prefill_batch)
        for key in step.decode:
            reply_left[key] -= 1
            if reply_left[key] == 0:
                running.remove(key)
        for chunk in step.prefill:
            assert 0 < chunk.n_tokens <= prompt_left[chunk.key]
            prompt_left[chunk.key] -= chunk.n_tokens
        for key in step.admit:
            queue.remove(key)
            running.append(key)
            admitted.append(key)
        assert len(running) <= budget.sessions
    assert not queue
    assert not running
    assert admitted == sorted(admitted)

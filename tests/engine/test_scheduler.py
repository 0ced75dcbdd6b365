"""The scheduler on paper: single plans, and thousands of random schedules."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.engine.scheduler import Budget, Plan, PrefillChunk, Running, Waiting, after, plan
from civetta.engine.shares import PrefillShares, QueueTickets

pytestmark = pytest.mark.timeout(240)  # a schedule may share its processor with much else
ALONE = Budget(sessions=1, prefill_batch=100, prefill_chunk=10)
THREE = Budget(sessions=3, prefill_batch=100, prefill_chunk=10)


def waiting(*keys):
    return [Waiting(key=key) for key in keys]


def chunks(*pairs):
    return tuple(PrefillChunk(key=key, n_tokens=n_tokens) for key, n_tokens in pairs)


def test_nothing_to_do():
    assert plan([], [], ALONE) == Plan()


def test_the_queue_is_admitted_in_its_order():
    assert plan(waiting(4, 5, 6), [], ALONE) == Plan(admit=(4,))
    assert plan(waiting(6, 5, 4), [], THREE) == Plan(admit=(6, 5, 4))
    assert plan(waiting(4), [Running(key=1, prompt_left=7)], ALONE).admit == ()


def test_a_lone_prefill_takes_whole_batches():
    assert plan([], [Running(key=1, prompt_left=250)], ALONE).prefill == chunks((1, 100))
    assert plan([], [Running(key=1, prompt_left=50)], ALONE).prefill == chunks((1, 50))


def test_a_prefill_beside_decoders_takes_small_chunks():
    running = [
        Running(key=1, prompt_left=0),
        Running(key=2, prompt_left=70),
        Running(key=3, prompt_left=70),
    ]
    assert plan([], running, THREE) == Plan(decode=(1,), prefill=chunks((2, 10)))


def test_short_prompts_share_a_launch():
    running = [Running(key=key, prompt_left=30) for key in (1, 2, 3)]
    assert plan([], running, THREE).prefill == chunks((1, 30), (2, 30), (3, 30))


def test_a_long_prompt_takes_what_short_ones_leave():
    running = [
        Running(key=1, prompt_left=900, turn=5),
        Running(key=2, prompt_left=30, turn=5),
        Running(key=3, prompt_left=50, turn=4),
    ]
    assert plan([], running, THREE).prefill == chunks((3, 50), (2, 30), (1, 20))


def test_what_a_step_may_not_compute_of_a_prompt_goes_to_the_next():
    running = [
        Running(key=1, prompt_left=900, at_once=64),
        Running(key=2, prompt_left=900, turn=1),
    ]
    assert plan([], running, THREE).prefill == chunks((1, 64), (2, 36))


def test_the_client_that_got_least_goes_first():
    running = [
        Running(key=1, prompt_left=900, client_id="a", client_served=300),
        Running(key=2, prompt_left=900, client_id="a", client_served=300),
        Running(key=3, prompt_left=900, client_id="b", client_served=200, turn=9),
    ]
    assert plan([], running, THREE).prefill == chunks((3, 100))


@dataclass
class Task:
    key: int
    client: str
    ticket: int
    prompt: int
    reply: int
    prefilled: int = 0
    replied: int = 0
    turn: int = 0
    prefill_waits: int = 0
    begun: bool = False


@dataclass
class World:
    """Requests on paper, moved by plans alone, with the accounts that the loop keeps."""

    budget: Budget
    queue: list[Task] = field(default_factory=list)
    running: list[Task] = field(default_factory=list)
    tickets: QueueTickets = field(default_factory=QueueTickets)
    shares: PrefillShares = field(default_factory=PrefillShares)
    step_no: int = 0
    made: int = 0
    ended: int = 0

    def submit(self, client, prompt, reply):
        ticket = self.tickets.take(client)
        self.queue.append(Task(self.made, client, ticket, prompt, reply))
        self.made += 1

    def cancel(self, index):
        tasks = [*self.queue, *self.running]
        if tasks:
            self.end(tasks[index % len(tasks)])

    def put_back(self, index):
        if self.running:
            task = self.running.pop(index % len(self.running))
            task.prompt += task.replied
            task.reply -= task.replied
            task.prefilled = task.replied = 0
            self.queue.append(task)

    def end(self, task):
        (self.queue if task in self.queue else self.running).remove(task)
        self.ended += 1

    def step(self):
        self.step_no += 1
        self.queue.sort(key=lambda task: (task.ticket, task.key))
        prefilling = [task for task in self.running if task.prefilled < task.prompt]
        decoding = [task for task in self.running if task.prefilled == task.prompt]
        made = plan([Waiting(key=task.key) for task in self.queue], self.views(), self.budget)
        assert made != Plan() or not (self.queue or self.running), "work is left, nothing planned"
        tasks = {task.key: task for task in (*self.queue, *self.running)}
        self.check_decode(made, decoding)
        self.check_prefill(made, prefilling, bool(decoding), tasks)
        self.check_admission(made, tasks)
        self.carry_out(made, tasks)

        return made

    def views(self):
        prefilling = {task.client for task in self.running if task.prefilled < task.prompt}
        served = self.shares.of(prefilling)
        return [
            Running(
                key=task.key,
                prompt_left=task.prompt - task.prefilled,
                client_id=task.client,
                client_served=served.get(task.client, 0),
                turn=task.turn,
            )
            for task in self.running
        ]

    def check_decode(self, made, decoding):
        """Every due decoder runs each round."""
        assert sorted(made.decode) == sorted(task.key for task in decoding)

    def check_prefill(self, made, prefilling, somebody_decodes, tasks):
        """The budget holds and is used up; every client's turn comes."""
        limit = self.budget.prefill_chunk if somebody_decodes else self.budget.prefill_batch
        given = sum(chunk.n_tokens for chunk in made.prefill)
        assert given == min(limit, sum(task.prompt - task.prefilled for task in prefilling))
        keys = [chunk.key for chunk in made.prefill]
        assert len(set(keys)) == len(keys)
        for task in prefilling:
            task.prefill_waits = 0 if task.key in keys else task.prefill_waits + 1
            # Between two turns every other session has at most one turn for each batch that this
            # client is ahead; no session waits longer than all of them together.
            assert task.prefill_waits <= 4 * self.budget.sessions * self.ahead()

    def ahead(self):
        return 1 + self.budget.prefill_batch // self.budget.prefill_chunk

    def check_admission(self, made, tasks):
        """Free sessions are filled from the queue's front."""
        free = self.budget.sessions - len(self.running)
        front = [task.key for task in self.queue[:free]]
        assert list(made.admit) == front

    def carry_out(self, made, tasks):
        for key in made.admit:
            task = tasks[key]
            self.queue.remove(task)
            self.running.append(task)
            self.tickets.used(task.ticket)
            task.turn = self.step_no
        for key in made.decode:
            tasks[key].replied += 1
            if tasks[key].replied == tasks[key].reply:
                self.end(tasks[key])
        for chunk in made.prefill:
            task = tasks[chunk.key]
            assert 0 < chunk.n_tokens <= task.prompt - task.prefilled
            task.prefilled += chunk.n_tokens
            task.turn = self.step_no
            self.shares.give(task.client, chunk.n_tokens)
        assert len(self.running) <= self.budget.sessions


budgets = st.builds(
    Budget,
    sessions=st.integers(1, 4),
    prefill_batch=st.integers(4, 12),
    prefill_chunk=st.integers(1, 4),
)
moves = st.tuples(
    st.sampled_from(["submit", "submit", "submit", "step", "step", "step", "cancel", "put back"]),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from("abc"),
)


@given(budgets, st.lists(moves, max_size=60))
@settings(max_examples=2000, deadline=None)
def test_any_schedule_keeps_its_budgets_and_comes_to_an_end(budget, played):
    """Arrivals, cancellations and evictions in any order; then everything left is served."""
    world = World(budget)
    for kind, first, second, client in played:
        if kind == "submit":
            world.submit(client, first, second)
        elif kind == "cancel":
            world.cancel(first)
        elif kind == "put back":
            world.put_back(first)
        else:
            world.step()
    work = sum(task.prompt + task.reply + 1 for task in (*world.queue, *world.running))
    for _ in range(work):
        if not world.queue and not world.running:
            break
        world.step()
    assert not world.queue
    assert not world.running
    assert world.ended == world.made


@given(budgets, st.integers(2, 4), st.integers(50, 400))
@settings(max_examples=200, deadline=None)
def test_clients_that_prefill_all_the_time_get_equal_shares(budget, n_clients, n_steps):
    budget = Budget(
        sessions=4, prefill_batch=budget.prefill_batch, prefill_chunk=budget.prefill_chunk
    )
    world = World(budget)
    for index in range(4):  # client 0 has most of the sessions
        world.submit(str(max(0, index - (4 - n_clients))), 10**6, 1)
    for _ in range(n_steps):
        world.step()
    got = {}
    for task in world.running:
        got[task.client] = got.get(task.client, 0) + task.prefilled
    assert len(got) == n_clients
    assert max(got.values()) - min(got.values()) <= budget.prefill_batch


@given(budgets, st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=9))
@settings(max_examples=300, deadline=None)
def test_the_next_step_is_foretold_while_nobody_ends(budget, prompts):
    """As the loop does it: behind the admissions, before any of the step's tokens."""
    world = World(budget)
    for client, prompt in prompts:
        world.submit(client, prompt, 10**6)
    foretold = None
    for _ in range(60):
        world.queue.sort(key=lambda task: (task.ticket, task.key))
        now = plan([Waiting(key=task.key) for task in world.queue], world.views(), budget)
        admitted = [task for task in world.queue if task.key in now.admit]
        views = world.views()
        assert world.step() == now
        assert foretold in (None, now.prefill)
        served = {view.client_id: view.client_served for view in views}
        views += [
            Running(
                key=task.key,
                prompt_left=task.prompt,
                client_id=task.client,
                client_served=served.get(task.client, 0),
                turn=world.step_no,
            )
            for task in admitted
        ]
        newcomers = {task.client for task in admitted} - served.keys()
        coming = plan([], after(views, now, step=world.step_no), budget).prefill
        foretold = None if newcomers else coming  # shares.py decides where those begin


def test_a_burst_of_one_client_does_not_hold_up_another():
    world = World(ALONE)
    for _ in range(20):
        world.submit("burst", 5, 1)
    world.step()
    world.submit("other", 5, 1)
    for _ in range(8):
        world.step()
    assert not any(task.client == "other" for task in (*world.queue, *world.running))
    assert len(world.queue) >= 16


@pytest.mark.parametrize("prompt", [30, 26_000, 250_000])
def test_the_gap_of_a_stream_is_one_chunk_at_any_prompt_length(prompt):
    world = World(Budget(sessions=2, prefill_batch=2048, prefill_chunk=512))
    world.submit("talker", 1, 10**6)
    world.step()
    world.step()
    world.submit("reader", prompt, 1)
    talker = world.running[0]
    before = talker.replied
    for step in range(1, 50):
        world.step()
        assert talker.replied == before + step

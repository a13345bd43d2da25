"""The scheduler against a simulated device: right tokens, no lost page, bounded waiting."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.runtime.pages import Pages
from deepinfer_jax.runtime.plans import Act, Chunk, Outcome, Policy
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.scheduler import Scheduler, State
from tests.runtime.simulated import Engine, Pair, Request, token

PAGE = 8


def _policy(slots=3, block=0, host=0, **options):
    rows = tuple(sorted({slots, slots * (1 + block), slots * (1 + block) + 4}))
    shapes = ((1, 4), (3, 4), (2, 16))
    return Policy(slots, rows, shapes, block=block, host_pages=host, **options)


def _check(engine: Engine, skip=()) -> None:
    """Everything came out right and everything was given back."""
    for number, request in engine.requests.items():
        if number not in skip:
            wanted = [token(number, request.prompt + i) for i in range(request.stop)]
            assert engine.outputs[number] == wanted, number
    scheduler = engine.scheduler
    assert engine.pages.free == engine.pages.total and scheduler.host_used == 0
    assert (
        not engine.device.host
        and len(scheduler) == 0
        and len(scheduler._free) == len(set(scheduler._free)) == scheduler.policy.slots
    )


def _check_waiting(engine: Engine) -> None:
    """Neither kind of step goes on longer than its burst while the other kind has work."""
    policy = engine.scheduler.policy
    prefills = decodes = 0
    for (lead, turns), step in zip(engine.could, engine.steps, strict=True):
        if step.prefill:
            prefills, decodes = (prefills + 1 if turns else 0), 0
        else:
            prefills, decodes = 0, (decodes + 1 if lead else 0)
        assert prefills <= policy.prefill_burst and decodes <= policy.decode_burst


def _check_moves(engine: Engine) -> None:
    """Nobody is brought back from the host for nothing."""
    for step in engine.steps:
        back = {move.request for move in step.moves if move.act is Act.RESTORE}
        gone = {move.request for move in step.moves if move.act in (Act.OFFLOAD, Act.EVICT)}
        assert not back & gone, step.moves


def _drive(engine: Engine, requests, arrivals, aborts) -> None:
    """Requests at their turns of arrival, aborts at theirs, until everything has ended."""
    turn, order = 0, sorted(range(len(requests)), key=lambda i: arrivals[i])
    while True:
        while order and arrivals[order[0]] <= turn:
            engine.add(order[0], requests[order[0]])
            order.pop(0)
        for number, when in aborts.items():
            if when == turn:
                engine.abort(number)
        if not engine.step() and not order:
            break
        turn += 1
        assert turn < 4000, "requests do not end"


requests_strategy = st.lists(
    st.builds(
        lambda prompt, new, part, kind, alone: Request(
            prompt, new, max(1, round(new * part)), kind, alone
        ),
        prompt=st.integers(1, 40),
        new=st.integers(1, 24),
        part=st.floats(0, 1),
        kind=st.sampled_from(["", "", "full"]),
        alone=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests_strategy,
    slots=st.integers(1, 4),
    block=st.sampled_from([0, 1, 5]),
    total=st.integers(8, 20),
    host=st.sampled_from([0, 3, 50]),
    late=st.integers(0, 2),
    bursts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    arrivals=st.lists(st.integers(0, 30), min_size=9, max_size=9),
    aborts=st.dictionaries(st.integers(0, 8), st.integers(0, 40), max_size=3),
)
def test_any_traffic(requests, slots, block, total, host, late, bursts, arrivals, aborts):
    """Arrivals, aborts, preemption of every sort: outputs, pages and waits are as they must be."""
    policy = _policy(slots, block, host, prefill_burst=bursts[0], decode_burst=bursts[1])
    engine = Engine(policy, Pages(total, slots, 8, PAGE), late)
    _drive(engine, requests, arrivals, aborts)
    _check(engine, skip=aborts)
    _check_waiting(engine)
    _check_moves(engine)


@settings(max_examples=60, deadline=None)
@given(
    requests=requests_strategy,
    slots=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    block=st.sampled_from([0, 1, 5]),
    totals=st.tuples(st.integers(8, 20), st.integers(8, 20)),
    host=st.sampled_from([0, 3, 50]),
    late=st.integers(0, 2),
    prefix=st.booleans(),
    arrivals=st.lists(st.integers(0, 30), min_size=9, max_size=9),
    aborts=st.dictionaries(st.integers(0, 8), st.integers(0, 40), max_size=3),
)
def test_any_traffic_over_two_groups(
    requests, slots, block, totals, host, late, prefix, arrivals, aborts
):
    """Requests move from one pool to another when their prompt is done: no page of either is lost,
    whatever is preempted or aborted on the way."""
    first = dataclasses.replace(_policy(slots[0], block), decodes=False)
    cache = PrefixPolicy(every=1) if prefix else None
    prompts = Engine(first, Pages(totals[0], slots[0], 8, PAGE), late, cache)
    decode = Engine(_policy(slots[1], block, host), Pages(totals[1], slots[1], 8, PAGE), late)
    pair = Pair(prompts, decode)
    _drive(pair, requests, arrivals, aborts)
    _check(prompts, skip=aborts)
    _check(decode, skip=aborts)
    longer = [n for n, request in enumerate(requests) if request.stop > 1 and n not in aborts]
    assert pair.moved >= len(longer)
    assert all(not step.prefill or host < 50 for step in decode.steps), "nothing computed twice"


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(
        st.builds(
            lambda prompt, new, part, text: Request(
                prompt, new, max(1, new // 2), shared=round(prompt * part), text=text
            ),
            prompt=st.integers(1, 60),
            new=st.integers(1, 8),
            part=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
            text=st.integers(0, 2),
        ),
        min_size=2,
        max_size=20,
    ),
    slots=st.integers(1, 4),
    total=st.integers(9, 20),
    shards=st.integers(1, 2),
    host=st.sampled_from([0, 3, 50]),
    policy=st.builds(
        lambda restore, states, **rest: PrefixPolicy(
            restore=restore, states=max(states, int(restore == "state")), **rest
        ),
        restore=st.sampled_from(["state", "replay"]),
        states=st.sampled_from([0, 1, 3, 100]),
        replay=st.sampled_from([8, 16]),
        every=st.integers(1, 4),
        host_bytes=st.sampled_from([0, 400, 10_000]),
    ),
    files=st.booleans(),
    arrivals=st.lists(st.integers(0, 200), min_size=20, max_size=20),
    aborts=st.dictionaries(st.integers(0, 19), st.integers(0, 60), max_size=2),
)
def test_any_traffic_with_shared_prefixes(
    shapes, slots, total, shards, host, policy, files, arrivals, aborts
):
    """Every row of every context is what was written for it, whoever computed it and wherever it
    has been since; no page is lost."""
    with tempfile.TemporaryDirectory() as folder:
        if files:
            policy = dataclasses.replace(policy, folder=Path(folder), disk_bytes=2000)
        slots *= shards
        pages = Pages(total * shards, slots, 9, PAGE, shards)
        shapes_of = _policy(slots, 1, host)
        if shards > 1:  # as many places as there could be of one shard
            shapes_of = dataclasses.replace(shapes_of, prefill=((2 * slots, 4), (2 * slots, 16)))
        engine = Engine(shapes_of, pages, 1, policy)
        _drive(engine, shapes, arrivals, aborts)
    _check(engine, skip=aborts)
    prefix = engine.device.prefix
    assert not prefix._known and not prefix._pending and not prefix._arrivals
    assert set(prefix._by_page) == engine.pages._kept
    assert {(node.key, page) for page, node in prefix._by_page.items()} == {
        (key, page) for key, node in prefix._nodes.items() for page in node.pages.values()
    }
    assert len(prefix._states) <= policy.states


def test_requests_that_fill_their_pages_use_every_slot():
    """No page is held back for one that cannot grow."""
    engine = Engine(_policy(4), Pages(8, 4, 2, PAGE))
    for number in range(4):
        engine.add(number, Request(9, 7, 7))
    engine.run()
    _check(engine)
    assert max(len(step.work) for step in engine.steps if not step.prefill) == 4


def test_preemption_to_the_host_and_back():
    """A pool for one and a half requests: the younger moves out and comes back; none recomputes."""
    engine = Engine(_policy(2, host=50), Pages(9, 2, 8, PAGE))
    for number in range(2):
        engine.add(number, Request(20, 40, 40))
    engine.run()
    _check(engine)
    assert engine.scheduler.preemptions[Act.OFFLOAD] >= 1
    assert engine.scheduler.preemptions[Act.EVICT] == 0
    moves = [move for step in engine.steps for move in step.moves if move.act is not Act.ADMIT]
    assert [move.act for move in moves[:2]] == [Act.OFFLOAD, Act.RESTORE]
    assert {move.request for move in moves} == {1}, "only the younger gives way"


def test_recomputation_only_when_the_host_is_full():
    for host, evicts in ((0, True), (50, False)):
        engine = Engine(_policy(3, host=host), Pages(10, 3, 8, PAGE))
        for number in range(3):
            engine.add(number, Request(12, 40, 40))
        engine.run()
        _check(engine)
        assert bool(engine.scheduler.preemptions[Act.EVICT]) == evicts
        assert bool(engine.scheduler.preemptions[Act.OFFLOAD]) != evicts


def test_next_step_is_planned_without_results():
    """With results one step late every decode step follows the one before without a gap, and what
    is reserved covers the longest that a block of drafts can have become."""
    pages = Pages(40, 2, 20, PAGE)
    scheduler = Scheduler(_policy(2, block=3), pages)
    scheduler.add(0, 6, 50)
    prefill = scheduler.plan()
    assert prefill.prefill and prefill.work == (Chunk(0, 0, 0, 6, True),)
    first, second = scheduler.plan(), scheduler.plan()  # nothing committed yet
    assert [len(step.work) for step in (first, second)] == [1, 1]
    # 6 + 1 sampled + 4 in the first step: the second writes up to 6 + 1 + 4 + 3 positions
    assert pages.held(0) == pages.needed(6 + 1 + 4 + 3)
    scheduler.commit(prefill, {0: Outcome(1)})
    scheduler.commit(first, {0: Outcome(1)})
    with pytest.raises(ValueError, match="step 1 committed after step 2"):
        scheduler.commit(prefill, {})


def test_no_turn_for_a_request_that_must_have_ended():
    scheduler = Scheduler(_policy(2), Pages(40, 2, 20, PAGE))
    scheduler.add(0, 3, 2)
    steps = [scheduler.plan(), scheduler.plan()]
    assert [step.prefill for step in steps] == [True, False]
    assert scheduler.plan() is None, "two tokens are on their way and two were asked for"
    scheduler.commit(steps[0], {0: Outcome(1)})
    scheduler.commit(steps[1], {0: Outcome(1)})
    assert len(scheduler) == 0


def test_chunks_depend_on_the_request_alone():
    """The same prompt is cut at the same places alone and in company (the same bits follow)."""

    def cuts(others):
        engine = Engine(_policy(4), Pages(64, 4, 16, PAGE))
        for number, request in enumerate([*others, Request(39, 3, 3)]):
            engine.add(number, request)
        engine.run()
        chunks = [item for step in engine.steps if step.prefill for item in step.work]
        shapes = {
            step.shape[1]
            for step in engine.steps
            for item in step.work
            if step.prefill and item.request == len(others)
        }
        return [(c.start, c.count) for c in chunks if c.request == len(others)], shapes

    alone = cuts([])
    assert alone == ([(0, 16), (16, 16), (32, 7)], {16})
    assert cuts([Request(5, 30, 30), Request(80, 4, 4), Request(17, 9, 9)]) == alone


def test_a_long_prompt_does_not_block_short_ones():
    """A prompt of 25 chunks arrives first: a short one's first token comes after two prefills."""
    engine = Engine(_policy(3, prefill_burst=1, decode_burst=1), Pages(80, 3, 64, PAGE))
    engine.add(0, Request(400, 2, 2))
    engine.step()
    engine.add(1, Request(3, 2, 2))
    while 1 in engine.requests and not engine.outputs[1]:
        engine.step()
    assert len(engine.steps) <= 5
    engine.run()
    _check(engine)


def test_a_big_request_is_not_passed_over_for_ever():
    """First in line but too big for now: nobody enters before it, though smaller ones would fit."""
    engine = Engine(_policy(3), Pages(8, 3, 8, PAGE))
    engine.add(0, Request(8, 20, 20))
    engine.add(1, Request(33, 2, 2))
    for number in range(2, 6):
        engine.add(number, Request(3, 4, 4))
    engine.run()
    _check(engine)
    entered = [m.request for step in engine.steps for m in step.moves if m.act is Act.ADMIT]
    assert entered[:2] == [0, 1]


def test_nobody_joins_a_leader_past_the_first_in_line():
    """While a prompt of three chunks leads, a small one could join it; the big one is first."""
    engine = Engine(_policy(3), Pages(8, 3, 8, PAGE))
    for number, prompt in enumerate((40, 33, 10)):
        engine.add(number, Request(prompt, 2, 2))
    engine.run()
    _check(engine)
    entered = [m.request for step in engine.steps for m in step.moves if m.act is Act.ADMIT]
    assert entered == [0, 1, 2]


def test_an_evicted_request_waits_for_its_tokens_in_flight():
    """Evicted with two steps in flight: it starts again only from all the tokens it has made."""
    scheduler = Scheduler(_policy(2), Pages(3, 2, 3, PAGE))
    scheduler.add(0, 8, 9)
    scheduler.add(1, 7, 9)
    steps = [scheduler.plan() for _ in range(3)]
    assert steps[2].moves[0].act is Act.EVICT and scheduler.state(1) is State.DRAINING
    scheduler.abort(0)
    for step in steps[:2]:
        assert scheduler.plan() is None
        scheduler.commit(step, {1: Outcome(1)})
    assert scheduler.state(1) is State.WAITING
    again = scheduler.plan()
    assert again.moves[0].act is Act.ADMIT and again.work == (Chunk(1, 0, 0, 9, True),)


def test_steady_stream_starves_nobody():
    """Under endless short arrivals every request gets its first token within a bounded wait."""
    engine = Engine(_policy(2, prefill_burst=2, decode_burst=2), Pages(30, 2, 12, PAGE))
    born, first = {}, {}
    for turn in range(600):
        if turn % 3 == 0 and turn < 450:
            number = turn // 3
            engine.add(number, Request(40 if number % 10 == 0 else 3, 4, 4))
            born[number] = turn
        engine.step()
        for number in born:
            if engine.outputs[number]:
                first.setdefault(number, turn)
    engine.run()
    _check(engine)
    _check_waiting(engine)
    order = sorted(first, key=lambda number: (first[number], number))
    late = [order.index(number) - number for number in first]
    assert max(late) <= 4, "nobody is overtaken by more than the slots at hand, twice"


def test_budget_picks_the_bucket():
    policy = Policy(4, (4, 8, 24), ((4, 8),), block=5)
    scheduler = Scheduler(policy, Pages(60, 4, 15, PAGE))
    for number in range(2):
        scheduler.add(number, 4, 50)
    scheduler.plan()
    assert scheduler.plan().shape == (24,)
    assert scheduler.plan(draft_rows=2).shape == (4,)
    assert scheduler.plan(draft_rows=5).shape == (8,)
    assert scheduler.plan(draft_rows=0).shape == (4,)


def test_refusals():
    scheduler = Scheduler(_policy(2), Pages(4, 2, 3, PAGE))
    with pytest.raises(ValueError, match="20 prompt tokens and 6 new ones need 4 pages"):
        scheduler.add(0, 20, 6)
    with pytest.raises(ValueError, match="a prompt and tokens to make: 0, 1"):
        scheduler.add(0, 0, 1)
    scheduler.add(0, 20, 5)
    assert scheduler.state(0) is State.WAITING
    with pytest.raises(ValueError, match="here already"):
        scheduler.add(0, 1, 1)
    assert scheduler.abort(0) and not scheduler.abort(0)
    for wrong in (
        {"decode_rows": (2,)},
        {"prefill": ()},
        {"prefill": ((0, 4),)},
        {"block": -1},
        {"decode_burst": 0},
    ):
        with pytest.raises(ValueError, match="policy"):
            Policy(**{"slots": 4, "decode_rows": (4,), "prefill": ((1, 4),)} | wrong)

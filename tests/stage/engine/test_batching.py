from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.stage.engine.batching import SHORT_ROWS, Backlog, Shape, Waiting
from meshswarm.stage.engine.jobs import MAX_OUTPUTS
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, Profile

STEP = Shape(n_rows=1, profile=Profile.FAST, takes_hidden=True, stop_layer=10)
CHUNK = STEP._replace(n_rows=128)


def backlog(*jobs: tuple[int, Shape, str], max_rows: int = 512, n_outputs: int = 0) -> Backlog[str]:
    queues: Backlog[str] = Backlog(max_rows)
    for slot, shape, item in jobs:
        queues.add(Waiting(slot, shape, n_outputs, item))
    return queues


def turns(queues: Backlog[str]) -> list[str]:
    """All turns until nothing waits, the items of a turn joined."""
    taken = []
    while queues:
        taken.append("".join(queues.next_turn().items))
    return taken


def test_nothing_waits_at_first() -> None:
    assert not backlog()
    assert backlog().waiting_kinds() == (False, False)


def test_decode_steps_of_neighbouring_slots_go_together_by_rising_slot() -> None:
    assert turns(backlog((2, STEP, "c"), (0, STEP, "a"), (1, STEP, "b"))) == ["abc"]


def test_a_gap_between_slots_splits_the_turn() -> None:
    assert turns(backlog((0, STEP, "a"), (2, STEP, "c"), (3, STEP, "d"))) == ["a", "cd"]


def filling(*slots: int, can_fill: bool = True, shape: Shape = STEP) -> list[tuple[list[int], list[int]]]:
    """Slots and fills of each turn."""
    queues: Backlog[int] = Backlog(512, can_fill=lambda _: can_fill)
    for slot in slots:
        queues.add(Waiting(slot, shape, 0, slot))
    taken = []
    while queues:
        turn = queues.next_turn()
        taken.append((turn.slots, turn.fills))
    return taken


def test_small_gaps_are_filled_where_the_slots_between_can_be() -> None:
    assert filling(0, 2, 5, 7) == [([0, 2, 5, 7], [1, 3, 4, 6])]
    assert filling(0, 2, can_fill=False) == [([0], []), ([2], [])]
    assert filling(0, 9, 10) == [([0], []), ([9, 10], [])]
    assert filling(0, 2, shape=STEP._replace(n_rows=8)) == [([0], []), ([2], [])]


def test_a_slot_with_another_job_may_fill_a_gap() -> None:
    queues: Backlog[str] = Backlog(512, can_fill=lambda _: True)
    for slot, shape in ((0, STEP), (1, CHUNK), (2, STEP)):
        queues.add(Waiting(slot, shape, 0, str(slot)))
    assert queues.next_turn().fills == [1]
    assert queues.next_turn().slots == [1]


def test_only_the_given_groups_go_each_in_one_turn() -> None:
    queues = backlog(*((slot, STEP, str(slot)) for slot in range(8)))
    groups = [range(4, 8), range(3)]
    assert ["".join(queues.next_turn(groups).items) for _ in range(2)] == ["012", "4567"]
    assert turns(queues) == ["3"]


def test_a_heavier_slot_gets_more_turns_when_there_are_too_few() -> None:
    shape = STEP._replace(n_rows=64)
    queues = backlog(*((slot, shape, str(slot)) for slot in range(3)))
    queues.set_weight(2, 2.0)
    taken = ""
    for _ in range(40):
        turn = queues.next_turn()
        taken += "".join(turn.items)
        for item in turn.items:
            queues.add(Waiting(int(item), shape, 0, item))
    assert [taken.count(item) for item in "012"] == [10, 10, 20]


def test_whoever_was_idle_has_no_claim_on_the_past() -> None:
    queues = backlog((0, CHUNK, "a"))
    for _ in range(50):
        queues.next_turn()
        queues.add(Waiting(0, CHUNK, 0, "a"))
    queues.add(Waiting(1, CHUNK, 0, "b"))
    taken = ""
    for _ in range(8):
        (item,) = queues.next_turn().items
        taken += item
        queues.add(Waiting("ab".index(item), CHUNK, 0, item))
    assert taken.count("b") == 4


def test_jobs_of_one_slot_keep_their_order_and_never_share_a_turn() -> None:
    assert turns(backlog((0, STEP, "1"), (0, STEP, "2"), (0, CHUNK, "3"), (0, STEP, "4"))) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "other",
    [
        STEP._replace(n_rows=2),
        STEP._replace(profile=Profile.EXACT),
        STEP._replace(stop_layer=9),
        STEP._replace(takes_hidden=False),
    ],
)
def test_only_equal_jobs_share_a_turn(other: Shape) -> None:
    assert turns(backlog((0, STEP, "a"), (1, other, "b"))) == ["a", "b"]


def test_prefill_chunks_go_one_at_a_time_between_the_decode_steps() -> None:
    queues = backlog((0, STEP, "a"), (1, CHUNK, "P"), (2, CHUNK, "Q"))
    taken = []
    for _ in range(6):
        taken += queues.next_turn().items
        queues.add(Waiting(0, STEP, 0, "a")) if taken[-1] == "a" else None
        queues.add(Waiting(1, CHUNK, 0, "P")) if taken[-1] == "P" else None
        queues.add(Waiting(2, CHUNK, 0, "Q")) if taken[-1] == "Q" else None
    assert "".join(taken) == "aPaQaP"


def test_every_waiting_step_is_served_between_two_prefill_chunks() -> None:
    queues = backlog((0, STEP, "a"), (2, STEP, "c"), (4, CHUNK, "P"), (4, CHUNK, "Q"))
    assert turns(queues) == ["a", "c", "P", "Q"]
    queues = backlog((4, CHUNK, "P"), (4, CHUNK, "Q"))
    queues.add(Waiting(0, STEP, 0, "a"))
    assert queues.next_turn().items == ["a"]
    queues.add(Waiting(0, STEP, 0, "b"))
    queues.add(Waiting(2, STEP, 0, "c"))
    assert turns(queues) == ["c", "P", "b", "Q"]


def test_an_exact_turn_keeps_to_the_rows_its_promise_allows() -> None:
    shape = STEP._replace(n_rows=2, profile=Profile.EXACT)
    queues = backlog(*((slot, shape, "x") for slot in range(30)))
    assert [len(turn) for turn in turns(queues)] == [EXACT_MAX_ROWS // 2, 30 - EXACT_MAX_ROWS // 2]


def test_a_turn_has_at_most_the_engines_rows() -> None:
    queues = backlog(*((slot, STEP._replace(n_rows=4), "x") for slot in range(8)), max_rows=12)
    assert [len(turn) for turn in turns(queues)] == [3, 3, 2]


def test_a_turn_has_a_bounded_number_of_outputs() -> None:
    queues = backlog(*((slot, STEP._replace(n_rows=16), "x") for slot in range(8)), n_outputs=16)
    assert [len(turn) for turn in turns(queues)] == [MAX_OUTPUTS // 16] * 2


def test_a_dropped_slot_gives_back_what_waited_in_it() -> None:
    queues = backlog((0, STEP, "a"), (1, STEP, "b"), (1, STEP, "c"))
    assert queues.drop(1) == ["b", "c"]
    assert queues.drop(1) == []
    assert turns(queues) == ["a"]


SHAPES = st.builds(
    Shape, st.sampled_from([1, 2, SHORT_ROWS, 48]), st.sampled_from(Profile), st.booleans(), st.sampled_from([5, 10])
)


@given(st.lists(st.tuples(st.integers(0, 7), SHAPES), max_size=60))
def test_every_job_is_served_once_in_its_slots_order(jobs: list[tuple[int, Shape]]) -> None:
    queues: Backlog[tuple[int, int, Shape]] = Backlog(64)
    for number, (slot, shape) in enumerate(jobs):
        queues.add(Waiting(slot, shape, 0, (slot, number, shape)))
    served = []
    while queues:
        turn = queues.next_turn().items
        slots = [slot for slot, _, _ in turn]
        assert slots == list(range(slots[0], slots[0] + len(slots)))
        assert len({shape for _, _, shape in turn}) == 1
        assert sum(shape.n_rows for _, _, shape in turn) <= 64
        served += turn
    assert sorted(number for _, number, _ in served) == list(range(len(jobs)))
    for slot in range(8):
        numbers = [number for other, number, _ in served if other == slot]
        assert numbers == sorted(numbers)


@given(st.lists(st.sampled_from([STEP, CHUNK]), min_size=2, max_size=8))
def test_nobody_starves(shapes: list[Shape]) -> None:
    """Sessions that always have the next job ready: everybody is served while each prefill has had one chunk."""
    round_turns = shapes.count(STEP) + 1
    queues: Backlog[int] = Backlog(512)
    for slot, shape in enumerate(shapes):
        queues.add(Waiting(slot, shape, 0, slot))
    waits = dict.fromkeys(range(len(shapes)), 0)
    for _ in range(60):
        turn = queues.next_turn().items
        for slot in waits:
            waits[slot] = 0 if slot in turn else waits[slot] + 1
            assert waits[slot] <= round_turns * max(1, shapes.count(CHUNK))
        for slot in turn:
            queues.add(Waiting(slot, shapes[slot], 0, slot))

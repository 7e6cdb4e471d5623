"""The choice of windows, driven by simulated routes: costs, acceptance and noise from a seed, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from meshswarm.head.drafting import Source, SuffixDrafter
from meshswarm.head.speculation import MAX_WINDOW, Learned, WindowChooser

Cost = Callable[[int], float]
"""Seconds of a step with so many rows."""
VOCABULARY = 5_000


def compute_bound(row_share: float) -> Cost:
    """No delay; each further row costs `row_share` of the first."""
    return lambda rows: 0.008 * (1 + row_share * (rows - 1))


def stepped(rows: int) -> float:
    """A kernel for one row, another for blocks of four: the second row costs most."""
    return 0.008 if rows == 1 else 0.014 + 0.002 * (-(-rows // 4) - 1)


def over_a_network(rtt_s: float) -> Cost:
    return lambda rows: rtt_s + compute_bound(0.3)(rows)


def edited(seed: int, length: int = 400, every: int = 40) -> tuple[list[int], list[int]]:
    """A document, and an answer that repeats it with a token replaced now and then."""
    rng = random.Random(seed)
    document = [rng.randrange(VOCABULARY) for _ in range(length)]
    answer = [
        rng.randrange(VOCABULARY) if index % every == every - 1 else token for index, token in enumerate(document)
    ]
    return document, answer


def prose(seed: int, length: int = 600) -> tuple[list[int], list[int]]:
    """Words by Zipf's law, each leaning on the one before: pairs come back often, and mostly go on differently."""
    rng = random.Random(seed)

    def word(before: int) -> int:
        local = random.Random(before * 1_000 + int(8 * rng.random() ** 2))
        return min(VOCABULARY - 1, int(local.paretovariate(0.6)) if rng.random() < 0.8 else rng.randrange(VOCABULARY))

    text = [0]
    while len(text) < length + 100:
        text.append(word(text[-1]))
    return text[:100], text[100:]


@dataclass
class Run:
    """What one answer took with speculation, and what it would have taken without."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


def simulate(
    prompt: Sequence[int],
    answer: Sequence[int],
    cost: Cost,
    learned: Learned,
    *,
    seed: int = 0,
    noise: float = 0.1,
    undo_s: float = 0.0,
) -> Run:
    """Run the true text of an answer through drafter and chooser. `noise`: spread of a step's seconds; `undo_s`: what
    the step after a rejection takes more."""
    rng = random.Random(seed)
    drafter, control, run = SuffixDrafter(prompt), WindowChooser(learned, undoing_costs=undo_s > 0), Run()
    at, must_undo = 0, False
    while at < len(answer):
        left = len(answer) - at
        draft = drafter.draft(MAX_WINDOW)
        window = control.choose(Source.TEXT, draft.match, min(len(draft.tokens), left - 1)).window
        said = tuple(answer[at : at + window + 1])
        right = next((i for i in range(window) if draft.tokens[i] != said[i]), window)
        said = said[: right + 1]
        slowness = rng.lognormvariate(0, noise)
        seconds = slowness * (cost(1 + window) + undo_s * must_undo)
        must_undo = right < window
        control.stepped(window, seconds, len(said))
        control.judge(draft, said)
        for token in said:
            drafter.push(token)
        at += len(said)
        run.seconds += seconds
        run.plain_seconds += slowness * cost(1) * len(said)
        run.steps += 1
        run.drafted += window
        run.accepted += right
    return run


@pytest.mark.parametrize("seed", range(5))
def test_an_edit_over_a_network_is_more_than_twice_and_a_half_as_fast_from_the_first_answer_on(seed: int) -> None:
    learned = Learned()
    assert simulate(*edited(seed), over_a_network(0.020), learned, seed=seed).speedup >= 2.5
    assert simulate(*edited(seed + 100), over_a_network(0.020), learned, seed=seed).speedup >= 3


@pytest.mark.parametrize("cost", [compute_bound(0.1), compute_bound(0.3), stepped], ids=["flat", "steep", "stepped"])
def test_an_edit_gains_on_one_machine_too_where_rows_are_cheaper_together(cost: Cost) -> None:
    assert simulate(*edited(7), cost, Learned()).speedup > 1.3


@pytest.mark.parametrize(
    "cost",
    [compute_bound(0.1), compute_bound(0.3), compute_bound(0.6), compute_bound(1.0), stepped, over_a_network(0.02)],
    ids=["flat", "steep", "steeper", "proportional", "stepped", "network"],
)
@pytest.mark.parametrize("seed", range(4))
def test_free_prose_loses_at_most_two_percent(cost: Cost, seed: int) -> None:
    learned = Learned()
    for answer in range(4):
        run = simulate(*prose(10 * seed + answer), cost, learned, seed=seed)
        assert run.speedup >= 0.98, f"answer {answer} of seed {seed}: {run}"


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_cost_a_step_each_are_no_reason_to_stop_an_edit_from_being_even(seed: int) -> None:
    """The worst route for speculation: nothing can be gained, at most the allowance lost."""
    assert simulate(*edited(seed), compute_bound(1.0), Learned(), seed=seed).speedup >= 0.98


@pytest.mark.parametrize("seed", range(3))
def test_undoing_is_part_of_the_price(seed: int) -> None:
    """A route that takes as long as three steps to undo a rejection must not lose either."""
    for text in (prose(seed), edited(seed, every=6)):
        run = simulate(*text, over_a_network(0.005), Learned(), seed=seed, undo_s=0.04)
        assert run.speedup >= 0.98, run


def test_a_route_that_becomes_cheap_is_found_out() -> None:
    learned = Learned()
    simulate(*edited(1, length=1000), compute_bound(1.0), learned)
    runs = [simulate(*edited(seed, length=600), over_a_network(0.05), learned) for seed in range(2, 6)]
    assert runs[-1].speedup > 2


def test_a_route_that_becomes_dear_is_left_alone() -> None:
    learned = Learned()
    simulate(*edited(1, length=1000), over_a_network(0.05), learned)
    total = [simulate(*prose(seed), compute_bound(1.0), learned) for seed in range(4)]
    assert sum(run.plain_seconds for run in total) / sum(run.seconds for run in total) >= 0.98


def test_probes_become_rare_where_nothing_pays() -> None:
    learned = Learned()
    simulate(*edited(1), compute_bound(1.0), learned)
    texts = [prose(seed) for seed in range(12)]
    drafted = [simulate(*text, compute_bound(1.0), learned).drafted for text in texts]
    assert sum(drafted[6:]) <= 0.005 * sum(len(answer) for _, answer in texts[6:]), drafted


def test_nothing_is_guessed_before_plain_steps_are_known_or_without_room() -> None:
    control = WindowChooser(Learned())
    assert control.choose(Source.TEXT, 64, MAX_WINDOW).window == 0
    control.stepped(0, 0.01, 1)
    control.stepped(0, 0.01, 1)
    assert control.choose(Source.TEXT, 64, MAX_WINDOW).window == 1
    assert control.choose(Source.TEXT, 64, 0).window == 0


@pytest.mark.parametrize("source", list(Source))
def test_steps_too_fast_for_the_clock_break_nothing(source: Source) -> None:
    control = WindowChooser(Learned())
    for window in (0, 0, 1, 3, 0):
        control.stepped(window, 0.0, 1)
        control.drafted(0.0, 4)
        assert 0 <= control.choose(source, 64, MAX_WINDOW).window <= MAX_WINDOW


def test_a_stall_in_the_very_first_try_does_not_end_speculation() -> None:
    control = WindowChooser(Learned())
    for _ in range(2):
        control.stepped(0, 0.01, 1)
    assert control.choose(Source.TEXT, 64, MAX_WINDOW).window == 1
    control.stepped(1, 3.0, 2)
    for _ in range(3):
        control.stepped(0, 0.01, 1)
    assert control.choose(Source.TEXT, 64, MAX_WINDOW).window > 0


def test_one_stalled_step_does_not_end_speculation() -> None:
    learned = Learned()
    simulate(*edited(1), over_a_network(0.02), learned)
    control = WindowChooser(learned)
    assert control.choose(Source.TEXT, 64, MAX_WINDOW).window > 3
    control.stepped(15, 2.0, 16)
    drafter_texts = edited(2)
    assert simulate(*drafter_texts, over_a_network(0.02), learned).speedup > 2

"""An answer in the making: what is sent when, what the client gets, how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from meshswarm.errors import MeshswarmError, RemoteError, RemoteProtocolError
from meshswarm.head.answer import Answer, Limits
from meshswarm.head.request import Finished, TextDelta
from meshswarm.head.sampler import Sampler
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.head.text_stream import TextStream
from meshswarm.stage.sessions.messages import Row

END = 0


class Letters:
    """A vocabulary of letters: token n is the n-th letter, token 0 ends."""

    def is_end_of_generation(self, token: int) -> bool:
        return token == END

    def token_bytes(self, token: int) -> bytes:
        return bytes([96 + token])


@dataclass
class Route:
    """A route that notes what is sent."""

    pushed: list[list[int]] = field(default_factory=list)
    full_rows: list[tuple[int, int]] = field(default_factory=list)

    def push(self, tokens: list[int], *, truncate_to: int | None = None, n_draft: int = 0) -> None:
        self.pushed.append(tokens)

    def request_full_row(self, seq: int, row: int) -> None:
        self.full_rows.append((seq, row))


def row(token: int) -> Row:
    return Row(np.array([token], "<i4").tobytes(), np.array([1.0], "<f4").tobytes(), -2.0)


def answer(
    route: Route,
    *,
    max_tokens: int | None = None,
    n_ctx: int = 100,
    ignore_eos: bool = False,
    stop: tuple[str, ...] = (),
    temperature: float = 0.0,
) -> Answer:
    prompt = [1, 2]
    return Answer(
        prompt,
        route,
        Letters(),
        Sampler(SamplingParams(temperature=temperature, seed=1), 27, prompt),
        TextStream(stop),
        Limits(max_tokens, n_ctx, ignore_eos, bool(stop)),
        "fp",
    )


async def told(making: Answer) -> tuple[str, Finished]:
    async with asyncio.timeout(10):
        events = [event async for event in making.events()]
    assert isinstance(events[-1], Finished)
    return "".join(event.text for event in events if isinstance(event, TextDelta)), events[-1]


async def test_the_next_token_is_sent_before_anything_is_told() -> None:
    route = Route()
    making = answer(route)
    making.start()
    making.on_rows(0, (row(8),))
    assert route.pushed == [[1, 2], [8]]
    assert not making._events, "text is made while the route computes"
    making.on_rows(1, (row(9),))
    making.on_rows(2, (row(END),))
    assert await told(making) == ("hi", making_finished(making, "stop", 2))
    assert route.pushed == [[1, 2], [8], [9]]


def making_finished(making: Answer, reason: str, n_tokens: int) -> object:
    """Equal to any Finished with this reason and count."""

    class Expected:
        def __eq__(self, other: object) -> bool:
            return (
                isinstance(other, Finished)
                and (other.reason, other.usage.completion_tokens) == (reason, n_tokens)
                and other.usage.prompt_tokens == len(making.prompt)
            )

    return Expected()


@pytest.mark.parametrize(("limits", "n_tokens"), [({"max_tokens": 3}, 3), ({"n_ctx": 6}, 4)])
async def test_limits_end_an_answer_and_nothing_is_sent_beyond_them(limits: dict[str, int], n_tokens: int) -> None:
    route = Route()
    making = answer(route, **limits)  # type: ignore[arg-type]
    making.start()
    for seq in range(n_tokens):
        making.on_rows(seq, (row(3),))
    making.on_rows(n_tokens, (row(3),))
    assert await told(making) == ("c" * n_tokens, making_finished(making, "length", n_tokens))
    assert len(route.pushed) == n_tokens


async def test_a_stop_string_ends_an_answer_before_the_next_token_is_sent() -> None:
    route = Route()
    making = answer(route, stop=("cd",))
    making.start()
    for seq, token in enumerate((1, 2, 3, 4)):
        making.on_rows(seq, (row(token),))
    assert await told(making) == ("ab", making_finished(making, "stop", 4))
    assert route.pushed == [[1, 2], [1], [2], [3]]


async def test_a_stop_string_completed_by_the_last_allowed_token_is_still_a_stop() -> None:
    making = answer(Route(), stop=("ab",), max_tokens=2)
    making.start()
    making.on_rows(0, (row(1),))
    making.on_rows(1, (row(2),))
    assert await told(making) == ("", making_finished(making, "stop", 2))


async def test_end_tokens_can_be_ignored() -> None:
    making = answer(Route(), ignore_eos=True, max_tokens=2)
    making.start()
    making.on_rows(0, (row(END),))
    making.on_rows(1, (row(1),))
    assert (await told(making))[1].usage.completion_tokens == 2


async def test_what_was_sampled_is_told_before_the_error_that_broke_the_route() -> None:
    making = answer(Route())
    making.start()
    making.on_rows(0, (row(8),))
    making.on_broken(RemoteError("lost"))
    events = making.events()
    assert await anext(events) == TextDelta("h", (8,))
    with pytest.raises(MeshswarmError, match="lost"):
        await anext(events)


async def test_a_row_that_lies_breaks_the_answer() -> None:
    making = answer(Route())
    making.start()
    making.on_rows(0, (row(1000),))
    with pytest.raises(RemoteProtocolError, match="not the model's"):
        await anext(making.events())


async def test_a_draw_in_the_tail_asks_for_the_whole_row_and_goes_on_with_it() -> None:
    route = Route()
    making = answer(route, temperature=1.0, max_tokens=1)
    making.start()
    making.on_rows(0, (Row(np.array([5], "<i4").tobytes(), np.array([0.0], "<f4").tobytes(), 20.0),))
    assert route.full_rows == [(0, 0)]
    logits = np.full(27, -30.0, "<f4")
    logits[5], logits[6] = 0.0, -1e-3
    making.on_full_row(0, 0, logits.tobytes())
    text, finished = await told(making)
    assert text in ("e", "f")
    assert finished.reason == "length"


async def test_a_step_faster_than_the_loops_clock_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop's clock counts milliseconds."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 5.0)
    making = answer(Route(), max_tokens=2)
    making.start()
    making.on_rows(0, (row(8),))
    making.on_rows(1, (row(9),))
    finished = making._events[-1]
    assert isinstance(finished, Finished)
    assert 0 < finished.timings.predicted_ms < 1000 and 0 < finished.timings.prompt_ms < 1000

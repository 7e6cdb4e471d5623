"""A head's requests over real sockets and engines: what is kept between them, and what happens when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.head.tiny_swarm import N_CTX, Model, tiny_swarm
from tests.stage.tiny_models import N_VOCAB

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import RefusedError
from meshswarm.head.chunking import TAIL_ROWS
from meshswarm.head.head import Head
from meshswarm.head.models import Voice
from meshswarm.head.request import Event, Finished, GenerationRequest, Queued, Speculation, Started, TextDelta
from meshswarm.head.routes import Routes
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.ledger.receipt import Outcome
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import RefusalReason, Refused

pytestmark = pytest.mark.usefixtures("unmeasured")

PROMPT = [(7 * n * n + 3) % N_VOCAB for n in range(100)]


class Numbers:
    """A vocabulary in which nothing ends an answer."""

    n_vocab = N_VOCAB
    suppressed = ()

    def check(self, tokens: list[int]) -> None:
        pass

    def is_end_of_generation(self, token: int) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % token


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[Model]:
    async with tiny_swarm("llama", tmp_path) as running:
        yield running


@pytest.fixture
def head(model: Model) -> Head:
    return head_of(model)


def head_of(model: Model) -> Head:
    card = ModelCard(
        bytes(32), "tiny", model.architecture, "f32", model.n_layers, (1000,), 100, N_CTX, model.n_embd, N_VOCAB
    )
    voice = Voice(card, Numbers(), {"F32"})  # type: ignore[arg-type]
    records = [
        CoverageRecord(hop.peer, hop.addresses, bytes(32), hop.span, True, "cpu", N_CTX, 10, 1, 1000)
        for hop in model.parts
    ]
    dht: Any = SimpleNamespace(
        coverage=answering(records),
        unreachable=frozenset,
        rtt_s=lambda peer: None,
        report_unreachable=lambda peer: None,
    )
    told: list[tuple[str | None, bytes]] = []

    async def answered(ref: str | None, model_id: bytes) -> None:
        told.append((ref, model_id))

    directory: Any = SimpleNamespace(resolve=answering(card), voice=answering(voice), answered=answered, told=told)
    routes = Routes(model.head, model.identity, dht, model.books, list)
    return Head(routes, directory, model.tasks, speculation=Speculation.OFF, max_wait_s=10.0)


def answering(value: Any) -> Callable[..., Any]:
    async def answer(*args: Any, **options: Any) -> Any:
        return value

    return answer


def request(prompt: list[int], max_tokens: int = 5, seed: int | None = None) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(temperature=1.0, seed=seed)
    return GenerationRequest(None, None, tuple(prompt), sampling, max_tokens, (), Profile.EXACT)


async def ask(head: Head, asked: GenerationRequest) -> tuple[list[int], Finished, list[Event]]:
    """The answer's tokens, its end, and all its events."""
    async with asyncio.timeout(30):
        events = [event async for event in head.generate(asked)]
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[-1], Finished)
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.token_ids]
    return tokens, events[-1], events


async def fresh(head: Head, asked: GenerationRequest) -> list[int]:
    """What a run that keeps nothing says."""
    kept, head._warm = head._warm, type(head._warm)()
    try:
        said = (await ask(head, asked))[0]
        await head.close()
        return said
    finally:
        head._warm = kept


async def test_a_next_turn_computes_what_is_new_and_says_what_a_fresh_run_says(head: Head, model: Model) -> None:
    said, end, _ = await ask(head, request(PROMPT))
    assert end.usage.cached_tokens == 0
    assert head.n_warm == 1
    chat = [*PROMPT, *said, 1, 2, 3]
    again, end, _ = await ask(head, request(chat))
    assert end.usage.cached_tokens == len(PROMPT) + len(said) - 1, "the last token drawn was never sent"
    assert end.timings.prompt_n == 4
    assert [server.sessions_total for server in model.servers] == [0, 1, 1]
    assert again == await fresh(head, request(chat))


async def test_what_a_name_meant_is_told_to_the_directory_once_the_answer_is_whole(head: Head) -> None:
    told: Any = head.directory
    asked = replace(request(PROMPT, max_tokens=3), model="tiny")
    events = head.generate(asked)
    async with asyncio.timeout(30), contextlib.aclosing(events):
        async for event in events:
            assert told.told == [] or isinstance(event, Finished)
    await asyncio.sleep(0)
    assert told.told == [("tiny", bytes(32))]
    with contextlib.suppress(StopAsyncIteration):
        async with contextlib.aclosing(head.generate(asked)) as cut_short:
            await anext(cut_short)
    assert told.told == [("tiny", bytes(32))], "who left heard nothing whole"


@pytest.mark.parametrize("architecture", ["qwen35moe", "deepseek4"])
async def test_a_turn_whose_history_is_written_anew_goes_on_from_the_last_prompt_whatever_the_family_keeps(
    architecture: str, tmp_path: Path
) -> None:
    """As templates do that leave out what a model thought: the end of the last prompt and the answer are others now.
    The answer is longer than the prompt: it is worth nothing any more, but is kept where there is room."""
    async with tiny_swarm(architecture, tmp_path) as model:
        head = head_of(model)
        await ask(head, request(PROMPT, max_tokens=30))
        for turn in (1, 2):
            chat = [*PROMPT[:-3], *(turn + n for n in range(20 * turn))]
            said, end, _ = await ask(head, request(chat))
            assert end.usage.cached_tokens == len(PROMPT) - TAIL_ROWS
            assert said == await fresh(head, request(chat))


async def test_a_thought_longer_than_its_prompt_costs_no_prompt(tmp_path: Path) -> None:
    async with tiny_swarm("qwen35moe", tmp_path) as model:
        head = head_of(model)
        await ask(head, request(PROMPT[:40], max_tokens=120))
        chat = [*PROMPT[:38], 1, 2, 3, 4]
        said, end, _ = await ask(head, request(chat))
        assert end.usage.cached_tokens == 40 - TAIL_ROWS
        assert head.n_warm == 2, "it went on from a copy"
        assert said == await fresh(head, request(chat))


async def test_a_draw_by_seed_is_the_same_on_a_kept_session(head: Head) -> None:
    said, _, _ = await ask(head, request(PROMPT, seed=7))
    chat = [*PROMPT, *said, 1, 2, 3]
    again, end, _ = await ask(head, request(chat, seed=8))
    assert end.usage.cached_tokens > 0
    assert again == await fresh(head, request(chat, seed=8))


async def test_a_conversation_that_would_lose_much_is_copied_where_there_is_room(head: Head, model: Model) -> None:
    await ask(head, request(PROMPT, max_tokens=80))
    other = [*PROMPT[:98], 30, 30]
    said, end, _ = await ask(head, request(other))
    assert end.usage.cached_tokens == 96, "the last whole step of the profile before they part"
    assert head.n_warm == 2
    assert [server.sessions_total for server in model.servers] == [0, 2, 2]
    assert said == await fresh(head, request(other))


async def test_without_room_for_a_copy_the_conversation_is_cut(head: Head, model: Model) -> None:
    await ask(head, request(PROMPT, max_tokens=80))
    for server in model.servers[1:]:
        assert server.served is not None
        while server.served.engine.acquire_slot() is not None:
            pass
    said, end, _ = await ask(head, request([*PROMPT[:98], 30, 30]))
    assert end.usage.cached_tokens == 96
    assert head.n_warm == 1
    assert len(said) == 5


@pytest.mark.parametrize("at", [1, 2])
async def test_a_session_that_is_gone_when_the_turn_comes_is_computed_again_unheard(
    head: Head, model: Model, at: int
) -> None:
    said, _, _ = await ask(head, request(PROMPT))
    chat = [*PROMPT, *said, 1, 2, 3]
    (parked,) = model.servers[at].sessions.values()
    parked.offer_receipt()  # it crosses the next turn on its way
    again, end, _ = await ask(head, request(chat))
    assert end.usage.cached_tokens == 0
    assert again == await fresh(head, request(chat))
    await head.close()
    async with asyncio.timeout(10):
        while len(kept := model.receipts.newest(10)) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [receipt.outcome for receipt in kept] == [Outcome.AGREED] * 6, "what was done is settled all the same"


async def test_a_client_that_leaves_ends_its_turn_and_nothing_is_kept(head: Head, model: Model) -> None:
    said, _, _ = await ask(head, request(PROMPT))
    events = head.generate(request([*PROMPT, *said, 1], max_tokens=100))
    assert isinstance(await anext(events), Started)
    await events.aclose()
    async with asyncio.timeout(10):
        while any(server.sessions for server in model.servers):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert head.n_warm == 0


async def test_a_request_stands_in_line_and_says_so(head: Head, model: Model) -> None:
    taken = []
    for server in model.servers[1:]:
        assert server.served is not None
        while (slot := server.served.engine.acquire_slot()) is not None:
            taken.append((server, slot))
    events = head.generate(request(PROMPT))
    queued = await anext(events)
    assert isinstance(queued, Queued)
    assert queued.place == 1
    for server, slot in taken:
        assert server.served is not None
        server.served.engine.release_slot(slot)
        server.on_room(None)
    async with asyncio.timeout(30):
        rest = [event async for event in events]
    assert isinstance(rest[-1], Finished)


async def test_a_client_that_leaves_the_line_is_forgotten_there(head: Head, model: Model) -> None:
    for server in model.servers[1:]:
        assert server.served is not None
        while server.served.engine.acquire_slot() is not None:
            pass
    events = head.generate(request(PROMPT))
    assert isinstance(await anext(events), Queued)
    await events.aclose()
    async with asyncio.timeout(10):
        while any(server.n_waiting for server in model.servers):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_who_will_not_wait_is_told_when_to_come_back(head: Head, model: Model) -> None:
    head._max_wait_s = 0.0
    for server in model.servers[1:]:
        server.draining = False
        server.refusal = lambda opening, peer: Refused(RefusalReason.BUSY, "full", 1500)  # type: ignore[method-assign]
    with pytest.raises(RefusedError, match="full") as caught:
        await ask(head, request(PROMPT))
    assert caught.value.retry_after_s == 1.5

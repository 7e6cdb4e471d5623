"""One request end to end at the head: what it remembers of peers that break the rules in the middle of an answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from meshswarm.artifacts.store import Store
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import RemoteProtocolError
from meshswarm.head.head import Head
from meshswarm.head.models import ModelDirectory
from meshswarm.head.request import Event, Finished, GenerationRequest, Started
from meshswarm.head.routes import Routes
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.identity import Identity
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm
from meshswarm.stage.messages import MAX_FRAME_BYTES, SESSION_STREAM, Close, Message, Open, Opened, Result, Row, Step
from meshswarm.stage.span import Span
from meshswarm.stage.wire import decode, encode
from meshswarm.tasks import Tasks


@dataclass
class Holder:
    """A peer whose whole model always says `token`."""

    endpoint: Endpoint
    dht: Dht
    token: int
    heard: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.endpoint.handle_stream(SESSION_STREAM, self.accept, max_frame_bytes=MAX_FRAME_BYTES)

    def accept(self, stream: Stream) -> None:
        def on_frame(frame: bytes) -> None:
            message = decode(frame)
            self.heard.append(message)
            if isinstance(message, Open):
                stream.send(encode(Opened("cpu", 512, bytes(32))))
            if isinstance(message, Step):
                row = Row(np.array([self.token], "<i4").tobytes(), np.array([1.0], "<f4").tobytes(), 0.0)
                stream.send(encode(Result(message.seq, (row,), None)))

        stream.receive_with(on_frame, lambda error: stream.finish())


@dataclass
class Scene:
    """A head that has the model on its disk and layers nowhere."""

    head: Head
    dht: Dht
    endpoint: Endpoint
    model_id: bytes
    swarm: Swarm
    holders: list[Holder] = field(default_factory=list)

    async def holder(self, token: int, us_per_layer: int) -> Holder:
        identity = Identity.generate()
        endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=self.swarm)
        dht = Dht(endpoint, identity, self.swarm)
        await dht.join([(self.endpoint.peer_id, (self.endpoint.address,))])
        record = CoverageRecord(
            endpoint.peer_id, (endpoint.address,), self.model_id, Span(0, 30), True, "cpu", 512, us_per_layer, 1, 512
        )
        await dht.publish_coverage(record)
        self.holders.append(Holder(endpoint, dht, token))
        return self.holders[-1]

    async def ask(self, max_tokens: int = 3) -> list[Event]:
        request = GenerationRequest(None, None, (100, 101), SamplingParams(temperature=0.0), max_tokens, ())
        return [event async for event in self.head.generate(request)]


@pytest.fixture
async def scene(tmp_path: Path, smollm2: Path) -> AsyncIterator[Scene]:
    swarm, identity, store = Swarm(f"test-{secrets.token_hex(8)}"), Identity.generate(), Store(tmp_path)
    info = store.import_file(smollm2)
    endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=swarm)
    dht = Dht(endpoint, identity, swarm)
    writer = ReceiptWriter(ReceiptStore(tmp_path / "ledger.sqlite"), lambda error: None)
    routes = Routes(endpoint, identity, dht, Bookkeeper(identity, writer, swarm.swarm_id), list)
    directory = ModelDirectory(endpoint, store, dht, tmp_path / "vocabularies")
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group, lambda error: pytest.fail(str(error)))
        running = Scene(Head(routes, directory, tasks), dht, endpoint, info.model_id, swarm)
        yield running
        for each in (endpoint, *(holder.endpoint for holder in running.holders)):
            await each.close()
    writer.close()


async def test_an_answer_from_its_start_to_its_close(scene: Scene) -> None:
    holder = await scene.holder(token=42, us_per_layer=1)
    events = await scene.ask()
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 3
    async with asyncio.timeout(10):
        while not isinstance(holder.heard[-1], Close):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_peer_that_breaks_the_rules_in_mid_answer_is_left_alone_next_time(scene: Scene) -> None:
    liar, honest = await scene.holder(token=10**6, us_per_layer=1), await scene.holder(token=42, us_per_layer=1000)
    with pytest.raises(RemoteProtocolError) as caught:
        await scene.ask()
    assert caught.value.peer == str(liar.endpoint.peer_id)
    events = await scene.ask()
    assert isinstance(events[0], Started)
    assert events[0].route.hops == ((str(honest.endpoint.peer_id), "0:30"),)

"""Runs one generation and writes it to the client, streamed (server-sent events) or whole.

The rule this file keeps: a generation lives exactly as long as somebody waits for it. Its events are iterated and
closed inside one task; that task is cancelled when the client goes away, when it stops reading, and when the peer
stops. `reply` has the two ways of writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshswarm.api.failure import INTERNAL_FAILURE, DrainingError, Failure, failure_of
from meshswarm.api.reply import ClientStalledError, Reply
from meshswarm.errors import MeshswarmError
from meshswarm.head.request import Events

_log = logging.getLogger(__name__)


class Running:
    """The answers being written, so that a peer that stops can wait for them or end them."""

    def __init__(self) -> None:
        self._answers: set[Answer] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining: DrainingError | None = None

    @contextlib.contextmanager
    def include(self, answer: Answer) -> Iterator[None]:
        """Counts `answer` as running inside the context. Raises DrainingError once the peer is stopping."""
        if self._draining is not None:
            raise self._draining
        self._answers.add(answer)
        self._idle.clear()
        try:
            yield
        finally:
            self._answers.discard(answer)
            if not self._answers:
                self._idle.set()

    @property
    def n_answers(self) -> int:
        return len(self._answers)

    async def drain(self, patience_s: float) -> None:
        """Accept no more answers, let those that run end, and after `patience_s` tell them that the peer stops."""
        self._draining = DrainingError("this peer is stopping; ask another one, or this one again when it is back")
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            for answer in list(self._answers):
                answer.interrupt(self._draining)


class Answer(Response):
    """A response that runs a generation while it is being sent. `explain` says how a client sees an error of it."""

    def __init__(
        self,
        generate: Callable[[], Events],
        make_reply: Callable[[Send], Reply],
        running: Running,
        explain: Callable[[MeshswarmError], Awaitable[Failure]],
    ) -> None:
        super().__init__()
        self._generate = generate
        self._make_reply = make_reply
        self._running = running
        self._explain = explain
        self._work: asyncio.Task[None] | None = None
        self._interruption: DrainingError | None = None

    def interrupt(self, reason: DrainingError) -> None:
        """End the generation; the client is told `reason`."""
        self._interruption = reason
        if self._work is not None:
            self._work.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._make_reply(send)
        try:
            with self._running.include(self):
                client_left = await self._write(reply, receive)
                if self._interruption is not None and not client_left:
                    raise self._interruption
        except DrainingError as error:
            with contextlib.suppress(ClientStalledError):
                await reply.fail(failure_of(error))

    async def _write(self, reply: Reply, receive: Receive) -> bool:
        """Write the answer to its end, or until the client leaves or `interrupt` is called; True when it left."""
        async with asyncio.TaskGroup() as group:
            self._work = group.create_task(self._produce(reply))
            leaving = group.create_task(_until_gone(receive))
            pulse = group.create_task(_keep_alive(reply))
            await asyncio.wait({self._work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            client_left = not self._work.done()
            self._work.cancel()
            await asyncio.wait({self._work})
            leaving.cancel()
            pulse.cancel()
        return client_left

    async def _produce(self, reply: Reply) -> None:
        try:
            await self._write_events(reply)
        except ClientStalledError as error:
            _log.info("%s", error)

    async def _write_events(self, reply: Reply) -> None:
        try:
            async with contextlib.aclosing(self._generate()) as events:
                async for event in events:
                    await reply.write(event)
            await reply.finish()
        except ClientStalledError:
            raise
        except MeshswarmError as error:
            await reply.fail(await self._explain(error))
        except Exception:
            _log.exception("an answer failed by a mistake of this peer")
            await reply.fail(INTERNAL_FAILURE)


async def _keep_alive(reply: Reply) -> None:
    with contextlib.suppress(ClientStalledError):  # whoever writes the events finds out too, and acts on it
        await reply.keep_alive()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Keeps a running peer's membership of a private swarm up to date: the thin shell around `standing` and `news`.

It asks every member it meets for news, and one of them now and then; takes over what the owner signed, from members or
from the commands of this machine, which write to the swarm's folder; and closes connections to who was expelled. The
rule this file keeps: what is taken over is on disk before it is used, so that no restart undoes an expulsion.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshswarm.artifacts.files import read_json, write_json
from meshswarm.errors import ArtifactError, ConfigError, MeshswarmError
from meshswarm.identity import PeerId
from meshswarm.membership.acquaintances import Acquaintances
from meshswarm.membership.folder import SwarmFolder
from meshswarm.membership.handover import Receiver
from meshswarm.membership.news import KIND, MAX_ANSWER_BYTES, MAX_QUESTION_BYTES, Answer, Question, answer_to, learned
from meshswarm.membership.standing import Standing
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

LOOK_S = 1.0
"""How often the folder is looked at: what a command wrote there is in force after this time."""
ASK_PERIOD_S = 90.0
BEHIND_PERIOD_S = 5.0
SAVE_PERIOD_S = 60.0
MAX_QUESTIONS = 8  # under way at a time
NEWS_TIMEOUT_S = 5.0

Report = Callable[[Mapping[str, Any]], None]


class Keeper:
    """Usable at once: it answers and notes whom it meets; `run` it for the rest. `clock`: Unix time in seconds."""

    def __init__(
        self,
        endpoint: Endpoint,
        folder: SwarmFolder,
        swarm: Swarm,
        standing: Standing,
        report: Report,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.standing = standing
        self.acquaintances = Acquaintances.from_json(read_json(folder.members))
        self._endpoint = endpoint
        self._folder = folder
        self._swarm = swarm
        self._report = report
        self._clock = clock
        self._rng = rng or random.Random()
        self._is_owner = folder.owner_key.exists()
        self._stamp = folder.stamp()
        self._due: dict[PeerId, None] = {}  # whom to ask, in this order
        self._wake = asyncio.Event()
        self._next_end_ms = standing.next_end_ms(self._now_ms())
        self._warned = ""
        endpoint.handle_request(
            KIND, self._answer, max_request_bytes=MAX_QUESTION_BYTES, max_reply_bytes=MAX_ANSWER_BYTES
        )
        endpoint.on_connection(self._meet)

    async def run(self) -> None:
        """Until cancelled. Says what a person should know through `report`."""
        for connection in self._endpoint.connections:
            self._meet(connection)
        try:
            async with asyncio.TaskGroup() as group:
                for duty in (self._look(), self._ask_about(), self._save()):
                    group.create_task(duty)
                for _ in range(MAX_QUESTIONS):
                    group.create_task(self._ask_due())
        finally:
            self._write_acquaintances(*self._unsaved())

    def view(self) -> dict[str, Any]:
        """Who is known in this swarm and how it stands, for `swarm members`."""
        connected = {connection.peer_id: connection.remote_address for connection in self._endpoint.connections}
        return {
            "swarm": self._folder.name,
            "peer_id": str(self._endpoint.peer_id),
            "addresses": [str(address) for address in self._endpoint.addresses],
            "connected": {str(peer): str(address) for peer, address in connected.items()},
            "number": self.standing.number,
            "is_behind": self.standing.is_behind,
        }

    # -- asking and answering

    def _meet(self, connection: Connection) -> None:
        if connection.peer_id == self._endpoint.peer_id:
            return
        self.acquaintances.meet(connection.peer_id, self._now_ms())
        self._ask_soon(connection.peer_id)

    def _ask_soon(self, peer: PeerId) -> None:
        self._due[peer] = None
        self._wake.set()

    async def _answer(self, peer: PeerId, data: bytes) -> bytes:
        question = Question.unpack(data)
        is_ahead = question.number > self.standing.number
        if is_ahead:
            self._ask_soon(peer)
        met = self.acquaintances.met() if question.wants_members else []
        return answer_to(question, peer, self._endpoint.peer_id, self.standing, met, self._now_ms()).pack()

    async def _ask_due(self) -> None:
        while True:
            while not self._due:
                self._wake.clear()
                await self._wake.wait()
            peer = next(iter(self._due))
            del self._due[peer]
            connection = self._endpoint.connection(peer)
            if connection is not None:
                with contextlib.suppress(MeshswarmError):  # it left, or answers nonsense: another member will do
                    await self._ask(connection)

    async def _ask(self, connection: Connection) -> None:
        peer = connection.peer_id
        receiver = Receiver(self._endpoint.peer_id, peer)
        question = Question.about(self.standing, receiver, wants_members=self._is_owner)
        reply = await connection.request(
            KIND, question.pack(), timeout_s=NEWS_TIMEOUT_S, max_reply_bytes=MAX_ANSWER_BYTES
        )
        answer = Answer.unpack(reply)
        self.acquaintances.hear(answer.named, said_by=peer)
        if answer.listed or answer.parcel:
            learned(answer, self.standing, receiver)  # raises before the disk is touched
            await self._change(lambda standing: learned(answer, standing, receiver))

    async def _ask_about(self) -> None:
        """One member now and then; all of them while a key is missing."""
        while True:
            await asyncio.sleep(
                BEHIND_PERIOD_S if self.standing.is_behind else ASK_PERIOD_S * self._rng.uniform(0.8, 1.2)
            )
            peers = [connection.peer_id for connection in self._endpoint.connections]
            chosen = peers if self.standing.is_behind else self._rng.sample(peers, min(1, len(peers)))
            for peer in chosen:
                self._ask_soon(peer)

    # -- taking over

    async def _look(self) -> None:
        """What commands on this machine have changed, and keys that end."""
        while True:
            stamp = await asyncio.to_thread(self._folder.stamp)  # a disk may hang; the peer must not
            if stamp != self._stamp:
                self._stamp = stamp
                await self._change(lambda standing: standing)
            if self._next_end_ms is not None and self._now_ms() >= self._next_end_ms:
                self._use(self.standing)
            await asyncio.sleep(LOOK_S)

    async def _change(self, change: Callable[[Standing], Standing]) -> None:
        try:
            standing = await asyncio.to_thread(self._folder.update, change)
        except ConfigError as error:  # as long as the files are not to be used, what is known goes on
            self._warn(error)
            return
        self._warned = ""
        if standing != self.standing:
            self._use(standing)

    def _use(self, standing: Standing) -> None:
        before, self.standing = self.standing, standing
        now_ms = self._now_ms()
        self._next_end_ms = standing.next_end_ms(now_ms)
        standing.apply(self._swarm, now_ms)
        self._close_former(is_new_key=before.keys[0] != standing.keys[0] or standing.is_behind)
        if standing.number != before.number or standing.is_behind:
            for connection in self._endpoint.connections:
                self._ask_soon(connection.peer_id)  # a question with a higher number makes the other side ask, too
        self._tell(before, standing, now_ms)

    def _close_former(self, *, is_new_key: bool) -> None:
        """Who was expelled; and after an expulsion those who may have come in with the older key he knows as well.
        Others who know the new one will be back at once."""
        for connection in list(self._endpoint.connections):
            peer = connection.peer_id
            if not self._swarm.admits(peer) or (is_new_key and not self.standing.may_have_key(peer)):
                while (found := self._endpoint.connection(peer)) is not None and not found.closed:
                    found.close("the swarm's owner has expelled it, or changed the key")

    def _tell(self, before: Standing, standing: Standing, now_ms: int) -> None:
        name = self._folder.name
        if before.keys[0] != standing.keys[0]:
            self._notice(f"The owner of the swarm {name!r} has changed its key; this peer has the new one.")
        if standing.is_outdated(now_ms) and not before.is_outdated(now_ms):
            self._notice(
                f"The key that this peer has of the swarm {name!r} does not count any more: ask a member for a new "
                "invite (`meshswarm swarm invite`) and enter it with `meshswarm swarm join`."
            )
        gone = set(standing.members.expelled if standing.members else ())
        gone -= set(before.members.expelled if before.members else ())
        for peer in sorted(gone):
            self._notice(f"The owner of the swarm {name!r} has expelled peer {peer.short}.")

    # -- inside

    async def _save(self) -> None:
        """A newcomer at once, for the commands to see; how long ago the others were met, now and then."""
        waited_s = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
            if self.acquaintances.has_new or waited_s >= SAVE_PERIOD_S:
                waited_s = 0.0
                await asyncio.to_thread(self._write_acquaintances, *self._unsaved())

    def _unsaved(self) -> list[dict[str, Any]]:
        """What is to be written, if anything."""
        if not self.acquaintances.is_changed:
            return []
        self.acquaintances.saved()
        return [self.acquaintances.as_json()]

    def _write_acquaintances(self, *changed: dict[str, Any]) -> None:
        """A hint, no promise: when the disk refuses, the next change tries again."""
        for fields in changed:
            if self._folder.root.is_dir():
                with contextlib.suppress(ArtifactError):
                    write_json(self._folder.members, fields)

    def _notice(self, sentence: str) -> None:
        self._report({"event": "notice", "message": sentence})

    def _warn(self, error: MeshswarmError) -> None:
        if str(error) != self._warned:
            self._warned = str(error)
            self._report({"event": "warning", "message": str(error)})

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

"""A peer for one errand: started, joined, used through its own endpoint or its parts, and gone again.

The rule this file keeps: whoever has an errand gets a peer that is ready and in a swarm, or an error that says what to
check; and the peer has left in good order when the errand is done, whether or not it succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshswarm.commands.control import RunningPeer
from meshswarm.commands.story import what_to_check
from meshswarm.config import Address, Home
from meshswarm.discovery.settings import DiscoverySettings, Use
from meshswarm.errors import ConfigError, LocalError, UnknownModelError
from meshswarm.fetching.sharing import SharingSettings
from meshswarm.identity import PeerId
from meshswarm.peer import Peer, PeerSettings
from meshswarm.serving import ServingSettings


@dataclass(frozen=True, slots=True)
class Where:
    """The folder of the peer, and how it gets into a swarm. None: what the folder belongs to."""

    home: Home
    swarm: str | None = None
    private: bool = False
    join: tuple[tuple[PeerId, Address], ...] = ()

    @property
    def is_chosen(self) -> bool:
        """Whether a person said anything about the swarm that only a peer of one's own can heed."""
        return bool(self.join) or self.swarm is not None or self.private

    def leave_to(self, running: RunningPeer, command: str) -> RunningPeer:
        """The peer that runs in the folder, which is asked in its own swarm. Raises ConfigError where another way in
        was asked for."""
        if self.is_chosen:
            raise ConfigError(
                f"a peer is running in the folder {self.home.root} and would be asked, in its own swarm; leave "
                f"--swarm, --private and --join out, or name another folder with `meshswarm --home DIR {command} ...`"
            )
        return running


@contextlib.asynccontextmanager
async def throwaway_peer(
    where: Where, *, serving: ServingSettings | None = None, say: Callable[[str], None] | None = None
) -> AsyncIterator[Peer]:
    """A peer that is ready, within the block. One that serves listens on loopback alone; `say` gets its sentences about
    models. Raises MeshswarmError: what kept it from starting, or ConfigError when nobody was reached of those to join.
    """
    ready = asyncio.Event()
    unreached: list[Mapping[str, Any]] = []
    n_reached = 0

    def report(event: Mapping[str, Any]) -> None:
        nonlocal n_reached
        match event["event"]:
            case "ready":
                ready.set()
            case "model" if say is not None:
                say(event["message"])
            case "join-failed":
                unreached.append(event)
            case "joined":
                n_reached = event["peers"]

    settings = PeerSettings(
        home=where.home,
        swarm=where.swarm,
        private=where.private,
        listen=Address("0.0.0.0" if serving is None else "127.0.0.1", 0),
        discovery=DiscoverySettings(lan=Use.NO, rendezvous=Use.NO),
        api=Address("127.0.0.1", 0),
        join=where.join,
        serving=serving,
        sharing=SharingSettings(seeds=False),  # it is gone before anybody could fetch much from it
    )
    peer = Peer(settings, report)
    living = asyncio.create_task(peer.run())
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((living, waiting), return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            await living
            raise LocalError("the peer that was started for this ended before it was ready")
        if unreached and not n_reached:
            peers = " or ".join(f"{event['peer']} at {event['address']}" for event in unreached)
            raise ConfigError(f"nobody can be asked: no way in through {peers}. {what_to_check(unreached[0])}")
        try:
            yield peer
        except UnknownModelError as error:
            if n_reached:
                raise
            raise UnknownModelError(f"{error}, and {_nobody(peer)}", param=error.param) from None
    finally:
        waiting.cancel()
        peer.stop()
        await living  # its own error, when it could not start or live on, says more than the errand's


def _nobody(peer: Peer) -> str:
    """That no peer was reached, which were tried, and what to do."""
    tried = "; ".join(
        f"{each['peer']} at {each['address']}" + (f": {each['why']}" if each["why"] else "") for each in peer.missed[:3]
    )
    told = f"tried {tried}). Is it running? --join names another" if tried else "none is known). --join names one"
    return f"no peer of the swarm {peer.membership.swarm.name!r} was reached ({told}"


def endpoint_of(peer: Peer) -> RunningPeer:
    """The endpoint of a peer of this process, to be asked in a thread beside the loop."""
    return RunningPeer(0, peer.api.base_url, None)

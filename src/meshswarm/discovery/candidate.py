"""What the ways of finding peers have in common: where they look, what they give, and how they fail.

The rule this file keeps: a candidate is a rumour. Whatever it says, only a handshake makes somebody a member.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from meshswarm.config import Address
from meshswarm.errors import LocalError
from meshswarm.identity import PeerId


class Source(StrEnum):
    """Where candidates come from; those named first are preferred where a choice must be made."""

    KNOWN = "known"
    ASKED = "asked"
    LAN = "lan"
    RENDEZVOUS = "rendezvous"

    @property
    def words(self) -> str:
        """What a person calls it."""
        return _WORDS[self]


_WORDS = {
    Source.KNOWN: "peers of last time",
    Source.ASKED: "addresses given",
    Source.LAN: "local network",
    Source.RENDEZVOUS: "rendezvous on BitTorrent's DHT",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Somebody who may be a peer of this swarm. `peer` None: the address is all that is known, its key is learned in
    the handshake. `addresses`: best first, at least one."""

    peer: PeerId | None
    addresses: tuple[Address, ...]
    source: Source


class SourceError(LocalError):
    """A way of finding peers does not work here and now. It is tried again later; the others go on."""


class CandidateSource(Protocol):
    """One way of finding peers."""

    @property
    def source(self) -> Source: ...

    @property
    def patience_s(self) -> float:
        """How long its first round may take to give somebody who is there."""

    @property
    def note(self) -> str:
        """What it has to say of itself, a few words; "" for nothing."""

    def candidates(self) -> AsyncIterator[Candidate]:
        """One round of looking, which may also go on for ever. Raises SourceError."""

    async def close(self) -> None:
        """Lets go of what it holds between rounds."""

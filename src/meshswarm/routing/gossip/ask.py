"""What the core wants asked: one question to one peer, as a value, and those that wait to be asked."""

from __future__ import annotations

from dataclasses import dataclass

from meshswarm.config import Address
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.neighbours import Neighbours


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """`dials`: make a connection to `addresses` when there is none; otherwise the question fails then. `about` and
    `number` are the core's own notes."""

    peer: PeerId
    addresses: tuple[Address, ...]
    kind: str
    payload: bytes
    timeout_s: float
    asked_at: float
    dials: bool = False
    about: PeerId | None = None
    number: int = -1


class Asks:
    """The questions that wait to be taken. Addresses come from `neighbours`, or else from whoever asks."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._waiting: list[Ask] = []

    def add(
        self,
        peer: PeerId,
        kind: str,
        payload: bytes,
        timeout_s: float,
        now: float,
        *,
        where: tuple[Address, ...] = (),
        dials: bool = True,
        about: PeerId | None = None,
        number: int = -1,
    ) -> None:
        addresses = self._neighbours.addresses(peer) or where
        self._waiting.append(Ask(peer, addresses, kind, payload, timeout_s, now, dials, about, number))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[Ask]:
        """All that wait, each once."""
        waiting, self._waiting = self._waiting, []
        return waiting

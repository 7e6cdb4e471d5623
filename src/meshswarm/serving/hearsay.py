"""What the choice of layers wants to hear of the swarm from minute to minute, and what it gets where nobody tells."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.told import Told


class Hearsay(Protocol):
    """The swarm as heard of lately."""

    def gone(self) -> frozenset[PeerId]:
        """Peers that are dead or have left."""

    def draining(self) -> frozenset[PeerId]:
        """Peers that take nothing new, because they are about to leave."""

    def loads(self) -> Mapping[PeerId, LoadReport]:
        """Fresh reports by peer."""

    def demand(self) -> Mapping[bytes, float]:
        """Requests a second by model."""

    def told(self, model_id: bytes, n_layers: int) -> Told | None:
        """What several peers say of who holds a model; None where too few speak of it."""


class Silence:
    """Nothing is heard: records alone count."""

    def gone(self) -> frozenset[PeerId]:
        return frozenset()

    def draining(self) -> frozenset[PeerId]:
        return frozenset()

    def loads(self) -> Mapping[PeerId, LoadReport]:
        return MappingProxyType({})

    def demand(self) -> Mapping[bytes, float]:
        return MappingProxyType({})

    def told(self, model_id: bytes, n_layers: int) -> Told | None:
        return None


SILENCE: Hearsay = Silence()

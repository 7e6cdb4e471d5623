"""What the parts above gossip want to know of it, and what they get where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.told import Told


class News(Protocol):
    """The swarm as heard of lately."""

    def gone(self) -> frozenset[PeerId]:
        """Peers that are dead or have left: of no use in a route."""

    def draining(self) -> frozenset[PeerId]:
        """Peers that take nothing new, because they are about to leave."""

    def loads(self) -> Mapping[PeerId, LoadReport]:
        """Fresh reports by peer."""

    def told(self, model_id: bytes, n_layers: int) -> Told | None:
        """What a few peers say together of who holds a model; None where too few speak of it."""

    def asked(self, model_id: bytes) -> None:
        """A client of this peer asked for a model: demand, of which others hear."""


class Quiet:
    """No news of anybody."""

    def gone(self) -> frozenset[PeerId]:
        return frozenset()

    def draining(self) -> frozenset[PeerId]:
        return frozenset()

    def loads(self) -> Mapping[PeerId, LoadReport]:
        return MappingProxyType({})

    def told(self, model_id: bytes, n_layers: int) -> Told | None:
        return None

    def asked(self, model_id: bytes) -> None:
        pass


QUIET: News = Quiet()

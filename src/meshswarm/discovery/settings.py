"""Which ways of finding peers a peer uses, and why it does not use the others.

The rule this file keeps: a peer that others cannot dial is not announced, and a private swarm shows itself to nobody
outside the local network unless somebody asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from meshswarm.config import Address
from meshswarm.dht.known_peers import KnownPeer, KnownPeers
from meshswarm.discovery.candidate import CandidateSource, Source
from meshswarm.discovery.lan import LanSource
from meshswarm.discovery.mainline import MainlineSource
from meshswarm.discovery.told import AskedSource, KnownSource
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

PATIENCE_S, SURVEY_PATIENCE_S = 4.0, 8.0
"""How long to wait for a rendezvous: at a start, and for who wants to know whether it works at all."""


class Use(Enum):
    """Whether a way of finding peers is used. DEFAULT: where it makes sense."""

    DEFAULT = "default"
    YES = "yes"
    NO = "no"

    @classmethod
    def of_switch(cls, switch: bool | None) -> Use:
        """What a person said with `--x`, `--no-x` or nothing."""
        return cls.DEFAULT if switch is None else cls.YES if switch else cls.NO


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """What a person chose. `nodes`: the DHT's nodes to start from in a closed network, instead of the public ones."""

    lan: Use = Use.DEFAULT
    rendezvous: Use = Use.DEFAULT
    nodes: tuple[Address, ...] = ()

    def why_no_lan(self, bound: Address) -> str:
        """Why the local network is not used by a peer that is `bound` there; "" when it is."""
        if self.lan is Use.NO:
            return "--no-lan"
        if self.lan is Use.DEFAULT and bound.is_loopback:
            return "this peer listens on loopback only"
        return ""

    def why_no_rendezvous(self, swarm: Swarm, bound: Address) -> str:
        """The same for the rendezvous."""
        if self.rendezvous is Use.NO:
            return "--no-rendezvous"
        if self.rendezvous is Use.YES or self.nodes:
            return ""
        if swarm.is_private:
            return "a private swarm is only announced there with --rendezvous"
        return "this peer listens on loopback only" if bound.is_loopback else ""


def make_sources(
    settings: DiscoverySettings,
    endpoint: Endpoint,
    swarm: Swarm,
    known: KnownPeers,
    asked: Sequence[KnownPeer],
    *,
    announces: bool = True,
    remembered: Path | None = None,
) -> tuple[list[CandidateSource], dict[Source, str]]:
    """The sources to use, and why each of the others is not. `announces` False: look, and say nothing of this peer.
    `remembered`: a file for nodes of the public DHT that answered."""
    sources: list[CandidateSource] = [KnownSource(known)]
    off: dict[Source, str] = {}
    bound = endpoint.address
    if asked:
        sources.append(AskedSource(asked))
    else:
        off[Source.ASKED] = "none were given (--join)"
    if why := settings.why_no_lan(bound):
        off[Source.LAN] = why
    else:
        sources.append(LanSource(swarm, endpoint.peer_id, bound, endpoint.families, announces=announces))
    if why := settings.why_no_rendezvous(swarm, bound):
        off[Source.RENDEZVOUS] = why
    else:
        sources.append(
            MainlineSource(
                swarm,
                bound.host,
                bound.port,
                nodes=settings.nodes,
                remembered=None if settings.nodes else remembered,
                announces=announces,
                patience_s=PATIENCE_S if announces else SURVEY_PATIENCE_S,
            )
        )
    return sources, off

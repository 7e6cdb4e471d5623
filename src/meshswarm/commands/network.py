"""The network part of `meshswarm doctor`: every way of finding peers tried for some seconds, and what came of it.

The rule this file keeps: it looks and says nothing of this machine to others; a peer that runs is asked instead of
tried beside, because two processes with one key would look like one peer that contradicts itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshswarm.commands.control import find_running
from meshswarm.commands.doctor import Finding, Verdict
from meshswarm.commands.serve import run_in_loop
from meshswarm.config import Address, Home
from meshswarm.dht.known_peers import KnownPeer, KnownPeers
from meshswarm.discovery.finder import Finder
from meshswarm.discovery.settings import DiscoverySettings, make_sources
from meshswarm.errors import MeshswarmError
from meshswarm.identity import Identity, PeerId
from meshswarm.membership.swarms import Swarms
from meshswarm.net.endpoint import Endpoint

MAX_LOOK_S = 12.0
ADVICE = {
    "known": "nothing is lost: others are found by the other ways, and remembered",
    "asked": "is it running, in the same swarm, at that address, and is its UDP port open in its firewall?",
    "lan": "give addresses with --join; --no-lan turns this off",
    "rendezvous": "let UDP out through the firewall, or give addresses with --join; --no-rendezvous turns this off",
}


@dataclass(frozen=True, slots=True)
class Search:
    """What a peer would be started with, as far as finding others goes."""

    home: Home
    swarm: str | None = None
    private: bool = False
    join: tuple[tuple[PeerId, Address], ...] = ()
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    listen: Address = field(default_factory=lambda: Address("0.0.0.0", 0))


def examine_network(search: Search) -> list[Finding]:
    """One finding for each way of finding peers. Never raises: what fails becomes a finding."""
    try:
        running = find_running(search.home)
        if running is not None:
            status = running.get("/meshswarm/status")
            return [*_unheeded(search, status["swarm"]), *_findings(status.get("discovery", ()))]
        return list(_findings(run_in_loop(_look(search))))
    except (MeshswarmError, OSError) as error:
        return [Finding("finding peers", Verdict.WARNING, str(error))]


async def _look(search: Search) -> list[dict[str, Any]]:
    """Tries every source once; raises MeshswarmError when there is no such swarm or no port."""
    home = search.home
    membership = Swarms(home).open(search.swarm, private=search.private, now_ms=int(time.time() * 1000))
    identity = Identity.load_or_create(home.key) if home.key.exists() else Identity.generate()
    endpoint = await Endpoint.bind(identity, search.listen, swarm=membership.swarm)
    known = KnownPeers(membership.known_peers, identity, membership.swarm.swarm_id)
    asked = [*((peer, (address,)) for peer, address in search.join), *membership.invited]
    sources, off = make_sources(
        search.discovery,
        endpoint,
        membership.swarm,
        known,
        asked,
        announces=False,
        remembered=home.dht_nodes if home.root.exists() else None,
    )
    finder = Finder(sources, endpoint, _do_nothing, lambda: (), off=off)
    looking = asyncio.create_task(finder.run())
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOOK_S):
                await finder.first()
        return [report.as_json() for report in finder.reports()]
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await endpoint.close()


async def _do_nothing(_peers: Sequence[KnownPeer]) -> None:
    """Whoever was reached is only counted."""


def _unheeded(search: Search, swarm: str) -> Iterator[Finding]:
    """That options were given which only a peer that is started with them can heed."""
    chosen = {
        "--swarm": search.swarm not in (None, swarm),
        "--private": search.private,
        "--join": bool(search.join),
        "--lan, --rendezvous": search.discovery != DiscoverySettings(),
    }
    options = ", ".join(option for option, is_chosen in chosen.items() if is_chosen)
    if options:
        advice = "stop it first, or look from another folder with `meshswarm --home DIR doctor ...`"
        found = f"the peer that runs here says how it found others, in its own swarm '{swarm}'; not heeded: {options}"
        yield Finding("finding peers", Verdict.WARNING, found, advice)


def _findings(reports: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for report in reports:
        source = str(report["source"])
        is_asked_in_vain = source == "asked" and report["used"] and not report["reached"]
        if report.get("failed") or is_asked_in_vain:
            yield Finding(f"peers: {report['what']}", Verdict.WARNING, str(report["found"]), ADVICE.get(source, ""))
        else:
            yield Finding(f"peers: {report['what']}", Verdict.OK, str(report["found"]))

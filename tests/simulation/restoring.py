"""A model loses all holders of some layers at once, and the peers that are left cover it again by themselves.

The rule this file keeps: it takes peers away and looks; who moves where is the product's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.catalogue import LARGE_LAYERS, LARGE_SPAN, Catalogue
from tests.simulation.clock import VirtualLoop, simulate
from tests.simulation.meter import Sent, TrafficMeter
from tests.simulation.movers import ImaginedMover, ImaginedServing, Machine, imagined_memory, know_kin
from tests.simulation.network import Network
from tests.simulation.peers import Crowd, Peer, coverage_record
from tests.simulation.scenarios import Say
from tests.simulation.shortcuts import shortcuts

from meshswarm.routing.placement import holders, neediest
from meshswarm.span import Span, missing_layers
from meshswarm.stage.families.cuts import LegalCuts

SETTLING_S = 30.0
WATCHED_S = 150.0
LOAD_S = 15.0
LEAVING = 0.3


@dataclass(frozen=True, slots=True)
class Restored:
    """`uncovered`: how many layers nobody was left for. `covered_s`: seconds until all had a loaded holder again, and
    `seen_s`: until a peer that has nothing to do with the model finds holders of all of them that live; None when that
    did not come within `WATCHED_S`. `known_gone_s`: until every holder that is left knew who had gone."""

    n_peers: int
    n_gone: int
    n_holders: int
    n_holders_gone: int
    uncovered: int
    known_gone_s: float | None
    covered_s: float | None
    seen_s: float | None
    n_moves: int
    n_moves_twice: int
    sent_before: Sent
    sent_by_holders: Sent
    faults: tuple[str, ...]


def restore(
    n_peers: int,
    seed: int,
    *,
    n_holders: int = 32,
    load_s: float = LOAD_S,
    watched_s: float = WATCHED_S,
    say: Say = lambda line: None,
) -> Restored:
    """`LEAVING` of all peers vanish in one moment, among them everybody who has the layers in the middle of a model of
    80 that `n_holders` serve, 10 layers each. It is watched for `watched_s` at least, and as long as is needed up to
    `WATCHED_S`."""
    loop = VirtualLoop()
    network = Network(loop, seed, loss=0.01)
    crowd = Crowd(network, gossips=True)

    async def main() -> Restored:
        catalogue = Catalogue(n_peers, large_share=0.0)
        crowd.settled(n_peers)
        chosen, others = crowd.living[:n_holders], crowd.living[n_holders:]
        catalogue.have_served(crowd, others)
        machine = Machine(LegalCuts(LARGE_LAYERS, tuple(range(LARGE_LAYERS)), None), LARGE_SPAN, load_s)
        servings = []
        for peer, span in zip(chosen, _spans(n_holders), strict=True):
            serving = ImaginedServing(peer, coverage_record(peer, catalogue.large.model_id, span), machine)
            servings.append(serving)
            await serving.announce()
        know_kin(chosen, LARGE_LAYERS)
        say("tables filled, records stored")
        for serving in servings:
            mover = ImaginedMover(serving, machine, network.rng)
            mover._moves.last_s = float("-inf")  # they have been there for long
            serving.peer.run(mover.run())
        await asyncio.sleep(SETTLING_S / 2)
        traffic, of_holders = TrafficMeter(crowd), TrafficMeter(crowd)
        traffic.excluded = set(chosen)
        of_holders.excluded = set(others)
        await asyncio.sleep(SETTLING_S / 2)
        sent_before, sent_by_holders = traffic.read(), of_holders.read()
        say(f"settled; a peer sends {sent_before.mean:.0f} B/s, one of the model {sent_by_holders.mean:.0f}")
        began = loop.now_s
        before = sum(len(serving.moves) for serving in servings)
        gone = _who_leaves(crowd, servings)
        crowd.vanish(gone)
        left = [serving for serving in servings if serving.peer.is_up]
        dead = {serving.peer.peer_id for serving in servings} - {serving.peer.peer_id for serving in left}
        uncovered = sum(len(gap) for gap in _missing(left))
        known_gone_s = covered_s = seen_s = None
        outsider = next(peer for peer in crowd.some(len(crowd.living)) if peer not in chosen)
        while loop.now_s - began < WATCHED_S and seen_s is None:
            await asyncio.sleep(0.5)
            passed = loop.now_s - began
            if known_gone_s is None and all(dead <= (s.peer.gossip.gone() if s.peer.gossip else set()) for s in left):
                known_gone_s = passed
                say(f"every holder knows who has gone after {passed:.1f} s")
            if covered_s is None and not _missing(left):
                covered_s = passed
                say(f"every layer is held again after {passed:.1f} s")
            if covered_s is not None:
                records = await outsider.dht.coverage(catalogue.large.model_id, LARGE_LAYERS, fresh=True)
                living = {serving.peer.peer_id for serving in left}
                if not missing_layers([r.span for r in records if r.peer in living and r.loaded], LARGE_LAYERS):
                    seen_s = loop.now_s - began
                else:
                    await asyncio.sleep(2.0)
        await asyncio.sleep(max(0.0, watched_s - (loop.now_s - began)))
        return Restored(
            n_peers=n_peers,
            n_gone=len(gone),
            n_holders=n_holders,
            n_holders_gone=n_holders - len(left),
            uncovered=uncovered,
            known_gone_s=known_gone_s,
            covered_s=covered_s,
            seen_s=seen_s,
            n_moves=sum(len(serving.moves) for serving in servings) - before,
            n_moves_twice=sum(len(serving.moves) > 1 for serving in servings),
            sent_before=sent_before,
            sent_by_holders=sent_by_holders,
            faults=tuple(network.faults[:5]),
        )

    with shortcuts(), imagined_memory():
        return simulate(main(), loop)


def _spans(n_holders: int) -> list[Span]:
    """Where peers that come one after the other settle."""
    windows = [Span(start, start + LARGE_SPAN) for start in range(LARGE_LAYERS - LARGE_SPAN + 1)]
    spans: list[Span] = []
    for _ in range(n_holders):
        span = neediest(windows, holders(spans, LARGE_LAYERS))
        assert span is not None
        spans.append(span)
    return spans


def _who_leaves(crowd: Crowd, servings: Sequence[ImaginedServing]) -> list[Peer]:
    """Everybody with layer 42, others of the model by chance up to the same share, and of the rest as many."""
    rng = crowd.network.rng
    doomed = [serving.peer for serving in servings if LARGE_LAYERS // 2 + 2 in serving.record().span]
    rest = [serving.peer for serving in servings if serving.peer not in doomed]
    doomed += rng.sample(rest, max(0, round(LEAVING * len(servings)) - len(doomed)))
    holding = {serving.peer for serving in servings}
    others = [peer for peer in crowd.living if peer not in holding]
    return [*doomed, *rng.sample(others, round(LEAVING * len(others)))]


def _missing(servings: Sequence[ImaginedServing]) -> tuple[Span, ...]:
    held = [serving.record().span for serving in servings if serving.peer.is_up and serving.record().loaded]
    return missing_layers(held, LARGE_LAYERS)

"""Which of the models that go by one name is meant: what speaks for each, and what that costs who would lie.

The rule this file keeps: signatures and records cost nothing, so none of them is counted. A network counts, once, when
one of its peers was reached from here, gives the model the name in a card of its own, and serves it; a network that
speaks for several of the models counts for each of them in part. Everything here is plain arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, groupby, zip_longest

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.dht.networks import network_of
from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.span import missing_layers

DIALS_AT_A_LAYER = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that goes by the name. `card`: its description by those who give it the name, `vouchers`."""

    card: ModelCard
    vouchers: frozenset[PeerId]


def shares(speaking: Mapping[bytes, frozenset[bytes]]) -> dict[bytes, Fraction]:
    """How much speaks for each model id; `speaking`: the networks that do."""
    spoken = Counter(chain.from_iterable(speaking.values()))
    return {
        model_id: sum((Fraction(1, spoken[network]) for network in networks), Fraction(0))
        for model_id, networks in speaking.items()
    }


def tiers(weight: Mapping[bytes, Fraction]) -> list[list[bytes]]:
    """The ids for which anything speaks, most first; those in one list nothing tells apart."""
    ordered = sorted((each for each in weight if weight[each] > 0), key=lambda each: (-weight[each], each))
    return [list(equal) for _, equal in groupby(ordered, key=lambda each: weight[each])]


def in_turn(of_each: Iterable[Sequence[CoverageRecord]], most: int) -> list[CoverageRecord]:
    """At most `most` records, of each list one after the other, so that none takes up the places of another."""
    mixed = chain.from_iterable(zip_longest(*of_each))
    return [record for record in mixed if record is not None][:most]


def likeliest(
    records: Iterable[CoverageRecord], met: Callable[[PeerId], bytes | None], lot: Callable[[PeerId], float], most: int
) -> list[CoverageRecord]:
    """Whom to dial first, `most` of them: who was met before, then one of every network that is claimed, by lot."""
    drawn = sorted(records, key=lambda record: (met(record.peer) is None, lot(record.peer)))
    seen: Counter[object] = Counter()
    rounds: list[tuple[int, CoverageRecord]] = []
    for record in drawn:
        claimed = met(record.peer) or next((network_of(address) for address in record.addresses), None)
        rounds.append((seen[claimed], record))
        seen[claimed] += 1
    return [record for _, record in sorted(rounds, key=lambda each: each[0])][:most]


def covering(
    records: Sequence[CoverageRecord],
    n_layers: int,
    met: Callable[[PeerId], bytes | None],
    lot: Callable[[PeerId], float],
    away: frozenset[PeerId],
) -> list[CoverageRecord]:
    """Whom to dial to see whether the model is whole: for each layer where the one before ends, a few that are loaded,
    those that were met first. Without those `away`."""
    loaded = [record for record in records if record.loaded and record.peer not in away]
    chosen: dict[PeerId, CoverageRecord] = {}
    layer = 0
    while layer < n_layers:
        here = [record for record in loaded if record.span.start <= layer < record.span.stop]
        if not here:
            break
        here.sort(key=lambda record: (met(record.peer) is None, lot(record.peer)))
        chosen |= {record.peer: record for record in here[:DIALS_AT_A_LAYER]}
        layer = here[0].span.stop
    return list(chosen.values())


def is_whole(records: Iterable[CoverageRecord], n_layers: int, reached: frozenset[PeerId]) -> bool:
    """True when those that were reached have every layer loaded."""
    return not missing_layers({r.span for r in records if r.loaded and r.peer in reached}, n_layers)

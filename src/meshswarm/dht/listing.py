"""What the table knows, in the form a person is shown: peers with what they serve, models with how many hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from meshswarm.artifacts.manifests.card import ModelCard, SignedCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import PeerId


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """One peer. `seen_s_ago`: since its last word to this one, None when only its records are known."""

    peer: PeerId
    addresses: tuple[Address, ...]
    seen_s_ago: float | None
    rtt_s: float | None
    reachable: bool
    serves: tuple[CoverageRecord, ...]
    model_names: Mapping[bytes, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "peer_id": str(self.peer),
            "addresses": [str(address) for address in self.addresses],
            "seen_s_ago": None if self.seen_s_ago is None else round(self.seen_s_ago, 1),
            "rtt_ms": None if self.rtt_s is None else round(self.rtt_s * 1e3, 3),
            "reachable": self.reachable,
            "serves": [self._served(record) for record in self.serves],
        }

    def _served(self, record: CoverageRecord) -> dict[str, Any]:
        model_id = model_id_text(record.model_id)
        return {
            "model": self.model_names.get(record.model_id, model_id),
            "model_id": model_id,
            "layers": str(record.span),
            "loaded": record.loaded,
            "n_ctx": record.n_ctx,
            "numclass": record.numclass,
            "us_per_layer": record.us_per_layer,
        }


def read_coverage(records: Iterable[SignedRecord]) -> list[CoverageRecord]:
    """The coverage records among `records`; what does not keep their limits is left out."""
    read = []
    for record in records:
        if record.kind is RecordKind.COVERAGE:
            try:
                read.append(CoverageRecord.from_record(record))
            except RemoteProtocolError:
                continue
    return read


def read_signed_cards(records: Iterable[SignedRecord]) -> list[SignedCard]:
    """The cards among `records` that the holder signed himself, about the model that the record is about."""
    cards = ((record, _card(record.body)) for record in records if record.kind is RecordKind.CARD)
    return [
        card
        for record, card in cards
        if card is not None and card.author == record.author and card.card.model_id == record.subject
    ]


def count_cards(
    signed: Iterable[SignedCard], met_in: Callable[[PeerId], bytes | None] = lambda peer: None
) -> list[tuple[ModelCard, int]]:
    """One card for each model id with the number of its holders; those held in most networks first, as far as their
    holders were met (`met_in`: where), and then those with most holders, whom anybody can invent.

    Where holders describe one model differently, the description that is given in most networks is shown, or by most of
    them. Two ids under one name are two models.
    """
    told: dict[bytes, dict[ModelCard, set[PeerId]]] = {}
    for each in signed:
        told.setdefault(each.card.model_id, {}).setdefault(each.card, set()).add(each.author)

    def weight(holders: Iterable[PeerId]) -> tuple[int, int]:
        who = set(holders)
        return len({met_in(peer) for peer in who} - {None}), len(who)

    shown = []
    for cards in told.values():
        card = max(cards, key=lambda card: (*weight(cards[card]), repr(card)))
        shown.append((card, weight(chain.from_iterable(cards.values()))))
    shown.sort(key=lambda each: (-each[1][0], -each[1][1], each[0].name, each[0].model_id))
    return [(card, n_holders) for card, (_, n_holders) in shown]


@lru_cache(maxsize=4096)
def _card(wire: bytes) -> SignedCard | None:
    try:
        return SignedCard.parse(wire)
    except RemoteProtocolError:
        return None

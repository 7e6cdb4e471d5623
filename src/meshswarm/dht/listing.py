"""What the table knows, in the form a person is shown: peers with what they serve, models with how many hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshswarm.artifacts.card import ModelCard, SignedCard
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


def count_cards(signed: Iterable[SignedCard]) -> list[tuple[ModelCard, int]]:
    """One card for each model id with the number of its holders, most holders first.

    Where holders describe one model differently, the description of most of them is shown. Two ids under one name are
    two models. What strangers say, as often as they like: good for a list, not for a choice.
    """
    told: dict[bytes, Counter[ModelCard]] = {}
    for each in signed:
        told.setdefault(each.card.model_id, Counter())[each.card] += 1
    models = [(max(cards, key=lambda card: (cards[card], repr(card))), cards.total()) for cards in told.values()]
    return sorted(models, key=lambda model: (-model[1], model[0].name, model[0].model_id))


@lru_cache(maxsize=4096)
def _card(wire: bytes) -> SignedCard | None:
    try:
        return SignedCard.parse(wire)
    except RemoteProtocolError:
        return None

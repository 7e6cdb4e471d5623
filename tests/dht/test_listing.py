"""Listings: models by their holders, and names that are not unique."""

from collections.abc import Callable
from dataclasses import replace

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.dht.keys import Topics
from meshswarm.dht.listing import PeerEntry, count_cards, read_coverage, read_signed_cards
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.identity import Identity

Identities = Callable[[int], Identity]

CARD = ModelCard(
    model_id=b"m" * 32,
    name="tiny",
    architecture="llama",
    encoding="q4_1",
    n_layers=30,
    file_lengths=(98_000_000,),
    header_length=2_000_000,
    n_ctx=8192,
    n_embd=576,
    n_vocab=49152,
)


def publish(
    identity: Identities, topics: Topics, card: ModelCard, holder: int, *, signer: int | None = None
) -> SignedRecord:
    signed = card.sign(identity(holder if signer is None else signer))
    return SignedRecord.sign(
        identity(holder),
        RecordKind.CARD,
        scope=topics.scope,
        subject=card.model_id,
        seq=1,
        expires_ms=1,
        body=signed.wire,
    )


def test_holders_are_counted_and_the_most_held_comes_first(identity: Identities, topics: Topics) -> None:
    other = replace(CARD, model_id=b"o" * 32, name="other")
    records = [publish(identity, topics, CARD, holder) for holder in (1, 2, 3)]
    records += [publish(identity, topics, other, 4)]
    assert count_cards(read_signed_cards(records)) == [(CARD, 3), (other, 1)]


def test_two_ids_under_one_name_are_both_listed(identity: Identities, topics: Topics) -> None:
    twin = replace(CARD, model_id=b"t" * 32)
    records = [publish(identity, topics, CARD, 1), publish(identity, topics, twin, 2)]
    assert [card.model_id for card, _ in count_cards(read_signed_cards(records))] == [CARD.model_id, twin.model_id]


def test_where_holders_differ_most_of_them_are_believed(identity: Identities, topics: Topics) -> None:
    lie = replace(CARD, name="better-name", n_layers=3)
    records = [publish(identity, topics, lie, 1)] + [publish(identity, topics, CARD, n) for n in (2, 3)]
    assert count_cards(read_signed_cards(records)) == [(CARD, 3)]


def test_who_was_met_counts_before_any_number_of_strangers(identity: Identities, topics: Topics) -> None:
    """Forty keys that nobody has met neither hide a model behind their own nor rename it."""
    fake, renamed = replace(CARD, model_id=b"f" * 32, name="fake"), replace(CARD, name="garbage")
    records = [publish(identity, topics, CARD, 1)]
    records += [publish(identity, topics, fake, n) for n in range(100, 140)]
    records += [publish(identity, topics, renamed, n) for n in range(200, 240)]
    met = {identity(1).peer_id: b"here"}
    assert count_cards(read_signed_cards(records), met.get) == [(CARD, 41), (fake, 40)]
    assert [card for card, _ in count_cards(read_signed_cards(records))] == [renamed, fake]


def test_a_card_counts_only_for_the_holder_who_signed_it_and_for_its_own_id(
    identity: Identities, topics: Topics
) -> None:
    borrowed = publish(identity, topics, CARD, 1, signer=2)
    misfiled = SignedRecord.sign(
        identity(1),
        RecordKind.CARD,
        scope=topics.scope,
        subject=b"x" * 32,
        seq=1,
        expires_ms=1,
        body=CARD.sign(identity(1)).wire,
    )
    garbage = SignedRecord.sign(
        identity(1), RecordKind.CARD, scope=topics.scope, subject=b"m" * 32, seq=1, expires_ms=1, body=b"garbage"
    )
    assert read_signed_cards([borrowed, misfiled, garbage]) == []


def test_coverage_out_of_its_limits_is_left_out(make_record: Callable[..., SignedRecord]) -> None:
    good, bad = make_record(1), make_record(2, body=b"\x91\x01")
    assert [record.peer for record in read_coverage([bad, good])] == [good.author]


def test_a_peer_is_shown_with_what_it_serves(make_coverage: Callable[..., CoverageRecord]) -> None:
    record = make_coverage(1)
    entry = PeerEntry(
        peer=record.peer,
        addresses=record.addresses,
        seen_s_ago=1.26,
        rtt_s=0.0015,
        reachable=True,
        serves=(record,),
        model_names={record.model_id: "tiny"},
    )
    shown = entry.as_json()
    assert shown["peer_id"] == str(record.peer)
    assert (shown["seen_s_ago"], shown["rtt_ms"]) == (1.3, 1.5)
    assert (shown["serves"][0]["model"], shown["serves"][0]["layers"]) == ("tiny", "0:10")

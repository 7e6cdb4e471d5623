"""The saved peers: a hint that only this peer may have written, and never worth a crash."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from meshswarm.config import Address
from meshswarm.dht.known_peers import (
    MAX_AGE_S,
    MAX_SAVED,
    MAX_SAVED_OF_NETWORK,
    MIN_EARLIER,
    KnownPeers,
    KnownPeersError,
    SeenPeer,
)
from meshswarm.identity import Identity, PeerId

ME, OTHER = Identity.from_seed(b"m" * 32), Identity.from_seed(b"o" * 32)
SWARM, ANOTHER_SWARM = b"s" * 16, b"t" * 16
NOW = 2_000_000_000.0
OLD = SeenPeer(PeerId(b"a" * 32), (Address("10.0.0.1", 4000), Address("2001:db8::1", 4001)), NOW - 500)
NEW = SeenPeer(PeerId(b"b" * 32), (Address("peer.example.org", 4002),), NOW - 5)


def cache(folder: Path, identity: Identity = ME, swarm_id: bytes = SWARM) -> KnownPeers:
    return KnownPeers(folder / "peers.json", identity, swarm_id)


def change(path: Path, what: Any) -> None:
    saved = json.loads(path.read_text())
    what(saved)
    path.write_text(json.dumps(saved))


def refusal(known: KnownPeers) -> str:
    with pytest.raises(KnownPeersError) as caught:
        known.load(NOW)
    assert str(known.path) in str(caught.value)
    return str(caught.value)


def test_what_is_saved_is_loaded_in_its_order(tmp_path: Path) -> None:
    cache(tmp_path).save([OLD, NEW], NOW)
    assert cache(tmp_path).load(NOW) == [OLD, NEW]
    assert list(tmp_path.iterdir()) == [cache(tmp_path).path]


def test_who_was_met_before_is_kept_behind_those_of_today(tmp_path: Path) -> None:
    cache(tmp_path).save([OLD], NOW - 400)
    cache(tmp_path).save([NEW], NOW)
    assert cache(tmp_path).load(NOW) == [NEW, OLD]
    cache(tmp_path).save([], NOW)  # a start without a network forgets nobody
    moved = SeenPeer(OLD.peer, (Address("10.0.0.9", 9),), NOW - 1)
    cache(tmp_path).save([moved], NOW)
    assert cache(tmp_path).load(NOW) == [moved, NEW]
    assert cache(tmp_path).load(NOW + MAX_AGE_S) == []


def test_no_file_is_no_peer(tmp_path: Path) -> None:
    assert cache(tmp_path).load(NOW) == []


def test_swarms_do_not_share_a_file(tmp_path: Path) -> None:
    cache(tmp_path).save([OLD], NOW)
    assert cache(tmp_path, swarm_id=ANOTHER_SWARM).load(NOW) == []
    cache(tmp_path, swarm_id=ANOTHER_SWARM).save([NEW], NOW)
    assert cache(tmp_path).load(NOW) == [OLD]


def test_a_file_that_somebody_else_wrote_is_refused(tmp_path: Path) -> None:
    cache(tmp_path, OTHER).save([OLD], NOW)
    assert "this peer did not write it" in refusal(cache(tmp_path))
    cache(tmp_path).save([NEW], NOW)  # and replaced by what this peer knows itself
    assert cache(tmp_path).load(NOW) == [NEW]


def test_a_file_about_another_swarm_is_refused(tmp_path: Path) -> None:
    foreign = cache(tmp_path, swarm_id=ANOTHER_SWARM)
    foreign.save([OLD], NOW)
    foreign.path.rename(cache(tmp_path).path)
    assert "another swarm" in refusal(cache(tmp_path))


@pytest.mark.parametrize(
    "what",
    [
        lambda saved: saved["peers"][0]["addresses"].append("10.6.6.6:6"),
        lambda saved: saved["peers"].pop(),
        lambda saved: saved["peers"][0].update(last_s=NOW),
        lambda saved: saved.update(swarm=ANOTHER_SWARM.hex()),
        lambda saved: saved.update(signature=saved["signature"][::-1]),
        lambda saved: saved.update(extra=1),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, what: Any) -> None:
    known = cache(tmp_path)
    known.save([OLD, NEW], NOW)
    change(known.path, what)
    assert "somebody changed it" in refusal(known)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"version": 1, "peers": []}', b'{"version": 2}',
        b'{"version": 2, "signature": 5}', b'{"version": 2, "signature": "zz"}', b"[" * 100_000, b" " * 1_100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    known = cache(tmp_path)
    known.path.write_bytes(content)
    refusal(known)


@pytest.mark.parametrize(
    "peers",
    [5, [None], [{}], [{"peer": str(OLD.peer), "addresses": [], "last_s": 1}], [{"peer": 5, "addresses": ["a:1"]}]],
)
def test_own_signature_does_not_make_nonsense_usable(tmp_path: Path, peers: Any) -> None:
    known = cache(tmp_path)
    body = {"version": 2, "swarm": SWARM.hex(), "peers": peers}
    signature = ME.sign("known-peers", json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    known.path.write_text(json.dumps({**body, "signature": signature.hex()}))
    refusal(known)


def test_only_so_many_are_kept_and_none_is_of_the_future(tmp_path: Path) -> None:
    known = cache(tmp_path)
    known.save([SeenPeer(PeerId(n.to_bytes(32)), (Address("10.0.0.1", n + 1),), NOW + n) for n in range(500)], NOW)
    loaded = known.load(NOW)
    assert len(loaded) == MAX_SAVED
    assert {each.last_s for each in loaded} == {NOW}
    assert loaded[0].addresses == (Address("10.0.0.1", 1),)


def at(number: int, host: str) -> SeenPeer:
    return SeenPeer(PeerId(number.to_bytes(32)), (Address(host, 4000),), NOW)


def test_a_stranger_with_many_keys_neither_fills_the_file_nor_drives_out_those_of_earlier_times(tmp_path: Path) -> None:
    known = cache(tmp_path)
    friends = [at(number, f"10.0.{number}.1") for number in range(50)]
    known.save(friends, NOW)
    known.save([at(1000 + number, f"203.0.113.{number % 250}") for number in range(500)], NOW)
    loaded = known.load(NOW)
    assert [each for each in loaded if each in friends] == friends
    assert len(loaded) == 50 + MAX_SAVED_OF_NETWORK
    known.save([at(2000 + number, f"10.1.{number % 250}.{number // 250}") for number in range(500)], NOW)
    loaded = known.load(NOW)
    assert len(loaded) == MAX_SAVED
    assert len([each for each in loaded if each in friends]) >= MIN_EARLIER - MAX_SAVED_OF_NETWORK


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache(tmp_path / "nowhere").save([OLD], NOW)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]

"""The saved peers: a hint that is never worth a crash."""

import json
import logging
from pathlib import Path

import pytest

from meshswarm.config import Address
from meshswarm.dht.known_peers import MAX_KNOWN_PEERS, load_known_peers, save_known_peers
from meshswarm.identity import PeerId

PEERS = [
    (PeerId(b"a" * 32), (Address("10.0.0.1", 4000), Address("2001:db8::1", 4001))),
    (PeerId(b"b" * 32), (Address("peer.example.org", 4002),)),
]


def test_what_is_saved_is_loaded_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    save_known_peers(path, PEERS)
    assert load_known_peers(path) == PEERS
    save_known_peers(path, PEERS[:1])
    assert load_known_peers(path) == PEERS[:1]
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_is_no_peer_and_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_known_peers(tmp_path / "peers.json") == []
    assert caplog.records == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"version": 2, "peers": []}',
        b'{"version": 1, "peers": {}}',
        b'{"version": 1}',
        b"[" * 100_000,
        b" " * 1_100_000,
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    assert load_known_peers(path) == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "text",
        [],
        {},
        {"peer": str(PEERS[0][0])},
        {"peer": str(PEERS[0][0]), "addresses": []},
        {"peer": str(PEERS[0][0]), "addresses": "10.0.0.1:4000"},
        {"peer": str(PEERS[0][0]), "addresses": ["10.0.0.1"]},
        {"peer": str(PEERS[0][0]), "addresses": [5]},
        {"peer": str(PEERS[0][0])[:-1] + "!", "addresses": ["10.0.0.1:4000"]},
        {"peer": 5, "addresses": ["10.0.0.1:4000"]},
    ],
)
def test_a_damaged_entry_spoils_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: object) -> None:
    path = tmp_path / "peers.json"
    good = {"peer": str(PEERS[1][0]), "addresses": [str(PEERS[1][1][0])]}
    path.write_text(json.dumps({"version": 1, "peers": [entry, good]}))
    assert load_known_peers(path) == [PEERS[1]]
    assert len(caplog.records) == 1


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    save_known_peers(path, [(PeerId(n.to_bytes(32)), (Address("10.0.0.1", n + 1),)) for n in range(500)])
    assert len(load_known_peers(path)) == MAX_KNOWN_PEERS


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_known_peers(tmp_path / "nowhere" / "peers.json", PEERS)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]

"""The nodes that answered earlier: kept as they are, and worth no error when they cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshswarm.config import Address
from meshswarm.discovery.dht_nodes import MAX_NODES, load_nodes, save_nodes, unpack_nodes

NODES = [Address("9.9.9.9", 6881), Address("2001:db8::1", 6882)]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    assert load_nodes(path) == []
    save_nodes(path, NODES)
    assert load_nodes(path) == NODES and list(tmp_path.iterdir()) == [path]
    save_nodes(path, [])
    assert load_nodes(path) == NODES, "a start without a network forgets nobody"
    save_nodes(path, [Address("9.9.9.9", n + 1) for n in range(500)])
    assert len(load_nodes(path)) == MAX_NODES
    save_nodes(tmp_path / "nowhere" / "nodes.json", NODES)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"5", b'{"version": 2, "nodes": []}', b'{"version": 1}', b'{"version": 1, "nodes": 5}',
        b'{"version": 1, "nodes": [5]}', b'{"version": 1, "nodes": ["x"]}', b"\xff", b" " * 70_000, b"[" * 60_000,
        b'{"version": 1, "nodes": ["224.0.0.1:1", "host:1", "0.0.0.0:1"]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(content)
    assert load_nodes(path) == []


def test_compact_addresses() -> None:
    packed = bytes([9, 9, 9, 9, 26, 225]), bytes.fromhex("20010db8000000000000000000000001") + bytes([26, 226])
    assert unpack_nodes([*packed, b"", b"short", bytes(19)]) == NODES

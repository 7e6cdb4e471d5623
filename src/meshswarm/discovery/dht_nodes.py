"""Nodes of BitTorrent's DHT that answered earlier, as plain JSON: with them a start needs no well-known node.

The rule this file keeps: the file is a hint. A damaged one is as good as none, and what is in it is bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshswarm.config import Address

MAX_NODES = 100
_MAX_FILE_BYTES = 64 * 1024
_VERSION = 1


def load_nodes(path: Path) -> list[Address]:
    """None when there is no such file, or none that can be used."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        if path.stat().st_size <= _MAX_FILE_BYTES:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["version"] == _VERSION:
                nodes = [Address.parse(text) for text in saved["nodes"][:MAX_NODES]]
                return [node for node in nodes if node.is_dialable]
    return []


def save_nodes(path: Path, nodes: Sequence[Address]) -> None:
    """Replaces the file, unless there is nobody to remember or it cannot be written."""
    if not nodes:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(json.dumps({"version": _VERSION, "nodes": [str(node) for node in nodes[:MAX_NODES]]}))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def unpack_nodes(compact: Iterable[bytes]) -> list[Address]:
    """Addresses in BitTorrent's compact form (BEP 5, BEP 32): an IP address of 4 or 16 bytes and a port of 2."""
    found = []
    for each in compact:
        family = {6: socket.AF_INET, 18: socket.AF_INET6}.get(len(each))
        if family is not None:
            found.append(Address(socket.inet_ntop(family, each[:-2]), int.from_bytes(each[-2:])))
    return found

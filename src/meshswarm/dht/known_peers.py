"""The peers of last time, as plain JSON: who to ask first at the next start.

The rule this file keeps: the file is a hint. One that is damaged, or partly so, is read as far as it makes sense, with
a warning, and never keeps a peer from starting; and it is written whole or not at all.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshswarm.config import Address
from meshswarm.dht.wire import MAX_ADDRESSES
from meshswarm.identity import PeerId

MAX_KNOWN_PEERS = 64
_MAX_FILE_BYTES = 1024 * 1024
_VERSION = 1

KnownPeer = tuple[PeerId, tuple[Address, ...]]

logger = logging.getLogger(__name__)


def load_known_peers(path: Path) -> list[KnownPeer]:
    """The peers in `path`, the best first; none when there is no such file or it is damaged."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("it is far too large")
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or saved.get("version") != _VERSION or not isinstance(saved.get("peers"), list):
            raise ValueError("it has another form")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("the known peers in %s cannot be read and are ignored: %s", path, error)
        return []
    known = {}
    for entry in saved["peers"][:MAX_KNOWN_PEERS]:
        try:
            peer, addresses = _read(entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            logger.warning("an entry of the known peers in %s cannot be read and is ignored", path)
        else:
            known[peer] = addresses
    return list(known.items())


def save_known_peers(path: Path, peers: Sequence[KnownPeer]) -> None:
    """Replaces the file. When that fails, there is a warning and the old file stays."""
    entries = [
        {"peer": str(peer), "addresses": [str(address) for address in addresses]}
        for peer, addresses in peers[:MAX_KNOWN_PEERS]
    ]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(json.dumps({"version": _VERSION, "peers": entries}, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("the known peers could not be saved to %s: %s", path, error.strerror or error)
        temporary.unlink(missing_ok=True)


def _read(entry: Any) -> KnownPeer:
    addresses = entry["addresses"]
    if not isinstance(addresses, list) or not addresses:
        raise ValueError("no addresses")
    return PeerId.parse(entry["peer"]), tuple(Address.parse(text) for text in addresses[:MAX_ADDRESSES])

"""What a peer calls itself on the local network: a name that only those who know the swarm can tell from noise.

`NONCE-TAG`: a nonce drawn anew every day, and a tag made from it with the swarm's name for the day as key. Members
compute the tag again; to everybody else two such names have nothing to do with each other, with a swarm, or with the
name that the same peer had the day before. The rule this file keeps: nothing else of the swarm or the peer goes in.
"""

from __future__ import annotations

import hmac
import re

from meshswarm.net.swarm import DAY_S, Swarm

NONCE_BYTES = 8
_TAG_BYTES = 10
_FORM = re.compile(rf"([0-9a-f]{{{2 * NONCE_BYTES}}})-([0-9a-f]{{{2 * _TAG_BYTES}}})")


def make_label(lan_name: str, nonce: bytes) -> str:
    """37 characters; `lan_name` is the swarm's for the day."""
    return f"{nonce.hex()}-{_tag(lan_name, nonce).hex()}"


def is_of_swarm(label: str, swarm: Swarm, now_s: float) -> bool:
    """Whether a member of `swarm` may have made `label`, its clock being up to a day off."""
    match = _FORM.fullmatch(label)
    if match is None:
        return False
    nonce, tag = bytes.fromhex(match[1]), bytes.fromhex(match[2])
    names = {swarm.lan_name(now_s + shift_s) for shift_s in (-DAY_S, 0, DAY_S)}
    return any(hmac.compare_digest(_tag(name, nonce), tag) for name in names)


def _tag(lan_name: str, nonce: bytes) -> bytes:
    return hmac.digest(lan_name.encode(), b"meshswarm/lan-label/1\0" + nonce, "sha256")[:_TAG_BYTES]

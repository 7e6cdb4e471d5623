"""Two peers that run with one key: seen by others from the instances that HELLO names.

An instance is drawn anew whenever a peer starts and never comes back, so a peer that started again shows a new one
every time. The rule this file keeps: only an instance that had already been replaced by another one is a sign.
"""

from __future__ import annotations

from collections import OrderedDict

from meshswarm.identity import PeerId

_MAX_PEERS = 1024
_MAX_INSTANCES = 4


class Instances:
    """The last instances of each peer."""

    def __init__(self) -> None:
        self._of: OrderedDict[PeerId, list[bytes]] = OrderedDict()

    def saw(self, peer: PeerId, instance: bytes) -> bool:
        """True when `peer` showed this instance before and another one since: both must be running."""
        seen = self._of.pop(peer, [])
        is_twin = instance in seen[:-1]
        if instance in seen:
            seen.remove(instance)
        self._of[peer] = [*seen, instance][-_MAX_INSTANCES:]
        if len(self._of) > _MAX_PEERS:
            self._of.popitem(last=False)
        return is_twin


def twins_sentence(peer: PeerId) -> str:
    return (
        f"two peers run with the key of peer {peer.short}: connections to it keep changing hands between them; "
        "each peer needs a key of its own"
    )


OWN_TWIN_SENTENCE = (
    "records of this very peer go round that it did not make: another process or machine runs with a copy of its key, "
    "and each withdraws what the other says; give every peer a key of its own (or was this machine's clock set back?)"
)

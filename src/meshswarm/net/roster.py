"""Which links lead to which peer, and which one of several is used.

For a moment there can be two to one peer: both dialled at once, or a peer started again before its old connection was
missed. The rule this file keeps: both sides choose the same one without talking about it, and a link that was not
chosen is closed only when nothing is open on it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from meshswarm.config import Address
from meshswarm.errors import PeerUnreachableError
from meshswarm.identity import PeerId
from meshswarm.net.codes import CloseCode
from meshswarm.net.link import Link

SURPLUS_CHECK_S = 1.0
MAX_LAST_SEEN = 1024


class Roster:
    """The established links of the peer `me`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, me: PeerId) -> None:
        self._loop = loop
        self._me = me
        self._links: dict[PeerId, list[Link]] = {}  # oldest first
        self._last_seen: OrderedDict[PeerId, Address] = OrderedDict()  # where a dial succeeded
        self._retiring: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many peers are connected."""
        return len(self._links)

    def get(self, peer_id: PeerId) -> Link | None:
        links = self._links.get(peer_id)
        return None if not links else self._best(links)

    def preferred(self) -> list[Link]:
        """One link per peer."""
        return [self._best(links) for links in self._links.values()]

    def at(self, sockaddr: Any) -> list[Link]:
        """Links to a socket address."""
        return [link for links in self._links.values() for link in links if link.sockaddr[:2] == sockaddr[:2]]

    def last_seen(self, peer_id: PeerId) -> list[Address]:
        """Where a dial of ours reached the peer the last time."""
        address = self._last_seen.get(peer_id)
        return [] if address is None else [address]

    def add(self, link: Link) -> None:
        """`link` has finished HELLO."""
        links = self._links.setdefault(link.peer_id, [])
        stale = [old for old in links if old.instance != link.instance]
        links.append(link)
        for old in stale:
            old.end(CloseCode.DONE, PeerUnreachableError(
                f"peer {link.peer_id.short} has started again", peer=str(link.peer_id)
            ))  # fmt: skip
        if link.is_dialled_here:
            self._last_seen[link.peer_id] = link.remote_address
            self._last_seen.move_to_end(link.peer_id)
            while len(self._last_seen) > MAX_LAST_SEEN:
                self._last_seen.popitem(last=False)
        if len(links) > 1:
            self._retire_later()

    def remove(self, link: Link) -> None:
        for peer_id, links in list(self._links.items()):
            if link in links:
                links.remove(link)
                if not links:
                    del self._links[peer_id]

    def close(self) -> None:
        if self._retiring is not None:
            self._retiring.cancel()

    def _best(self, links: list[Link]) -> Link:
        """The one that the peer with the smaller id dialled. Of several by the same side, that side keeps its first
        (one dial can succeed over two addresses), the other takes the newest (a redial means that the first was lost).
        """

        def rank(entry: tuple[int, Link]) -> tuple[bool, int]:
            age, link = entry
            return self._is_by_smaller(link), -age if link.is_dialled_here else age

        return max(enumerate(links), key=rank)[1]

    def _is_by_smaller(self, link: Link) -> bool:
        return link.is_dialled_here == (self._me < link.peer_id)

    def _retire_later(self) -> None:
        if self._retiring is None:
            self._retiring = self._loop.call_later(SURPLUS_CHECK_S, self._retire)

    def _retire(self) -> None:
        """Close what was not chosen and carries nothing; its dialler does it, who knows what it uses it for."""
        self._retiring = None
        for links in list(self._links.values()):
            best = self._best(links)
            for link in list(links):
                if link is not best and link.is_dialled_here and not link.is_used:
                    link.end(CloseCode.SURPLUS, PeerUnreachableError(
                        f"another connection to peer {link.peer_id.short} is used", peer=str(link.peer_id)
                    ))  # fmt: skip
        if any(len(links) > 1 for links in self._links.values()):
            self._retire_later()

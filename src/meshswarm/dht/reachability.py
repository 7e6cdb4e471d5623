"""Whether others can dial this peer: what it may conclude by itself, and when it should have somebody try.

A peer behind an address translator or a firewall is a client: it asks and publishes, and enters nobody's table, where
it would cost everybody a time-out. The rule this file keeps: where all addresses are local ones (one machine, one LAN)
nothing stands between peers and everybody is a server; a peer whose public address is not its own is a client until
another peer, that it had no connection with, has dialled it; one whose address is its own is a server until two such
peers in a row could not. What one peer claims decides nothing alone when there are others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from meshswarm.config import Address
from meshswarm.dht.messages import Verdict
from meshswarm.dht.networks import is_local

RECHECK_S = 1800.0  # after a success: translators forget, people change routers
RETRY_S = 300.0  # after a failure, or when nobody could try
MAX_SILENT = 2


class Reachability:
    """`fixed`: what a person decided; None to find out."""

    def __init__(self, fixed: bool | None) -> None:
        self._fixed = fixed
        self._is_public = False
        self._is_translated = False
        self._observed: Address | None = None
        self._silent = 0
        self._reached: Address | None = None
        self._next_check = float("-inf")

    @property
    def is_server(self) -> bool:
        if self._fixed is not None:
            return self._fixed
        if self._is_translated:
            return self._reached is not None
        return self._silent < MAX_SILENT

    @property
    def extra_addresses(self) -> tuple[Address, ...]:
        """Where others reach this peer although the address is not its own: the translator's, once that has worked."""
        return (self._reached,) if self._is_translated and self._reached is not None else ()

    def observed(self, own: Iterable[Address], claims: Iterable[str]) -> None:
        """`claims`: this peer's address as each connected peer sees it. Local ones say nothing."""
        seen: Counter[Address] = Counter()
        for claim in claims:
            address = _public(claim)
            if address is not None:
                seen[address] += 1
        if not seen:
            return
        hosts = {address.host for address in own}
        foreign = sum(count for address, count in seen.items() if address.host not in hosts)
        self._is_public = True
        self._is_translated = 2 * foreign > seen.total()
        self._observed = seen.most_common(1)[0][0]
        if self._reached is not None and self._reached.host != self._observed.host:
            self._reached, self._next_check = None, float("-inf")

    def wants_check(self, now: float) -> bool:
        """True when it is time to ask a peer to have this one dialled."""
        return self._fixed is None and self._is_public and now >= self._next_check

    def checked(self, verdict: Verdict, now: float) -> None:
        """A third peer tried, or nobody could."""
        if verdict is Verdict.REACHED:
            self._silent, self._reached = 0, self._observed
        elif verdict is Verdict.SILENT:
            self._silent += 1
            if self._silent >= MAX_SILENT:
                self._reached = None
        is_well = verdict is Verdict.REACHED or (verdict is Verdict.UNKNOWN and self.is_server)
        self._next_check = now + (RECHECK_S if is_well else RETRY_S)


@lru_cache(maxsize=1024)
def _public(claim: str) -> Address | None:
    """The address that `claim` is; None for a local one, and for what is no address."""
    try:
        address = Address.parse(claim)
    except ValueError:
        return None
    return address if address.is_dialable and not is_local(address) else None

"""Write tokens: who wants to store here must have asked here, as the same peer, a short while ago.

As in BEP 44: the token is a keyed hash of the asker and of the time, so that nothing needs to be remembered about it.
It keeps a peer from spraying records over nodes it never looked up, and dies with the process that made it.
"""

from __future__ import annotations

import hashlib
import hmac

from meshswarm.dht.messages import TOKEN_BYTES
from meshswarm.identity import PeerId

TOKEN_PERIOD_S = 300.0  # a token is good for one to two periods


class TokenIssuer:
    """`secret`: random bytes of this process, never stored."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(self, peer: PeerId, now: float) -> bytes:
        return self._token(peer, int(now // TOKEN_PERIOD_S))

    def accepts(self, token: bytes, peer: PeerId, now: float) -> bool:
        period = int(now // TOKEN_PERIOD_S)
        return any(hmac.compare_digest(token, self._token(peer, p)) for p in (period, period - 1))

    def _token(self, peer: PeerId, period: int) -> bytes:
        message = peer.key + period.to_bytes(8, signed=True)
        return hmac.new(self._secret, message, hashlib.sha256).digest()[:TOKEN_BYTES]

"""From the end of TLS to the end of HELLO on one connection: which certificate counts, whose turn it is, what may come.

Pure code around the two state machines of `handshake`. The rule this file keeps: a server takes nothing but HELLO from
a client before HELLO is over. A client may get a little ahead of its server's last message (packets overtake each
other), so it keeps that until the server has proved itself, and drops it with the connection if it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cryptography import x509

from meshswarm.errors import MeshswarmError, PeerUnreachableError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.certificate import certificate_hash, certificate_key
from meshswarm.net.codes import CloseCode
from meshswarm.net.handshake import HELLO_TIMEOUT_S, NONCE_BYTES, Action, ClientHello, Failed, Self, Send, ServerHello

MAX_EARLY_BYTES = 256 * 1024
EarlyData = tuple[int, bytes, bool]  # stream id, data, end of stream


class Greeting:
    """The HELLO of a connection that we dialled to `server`, or that a stranger dialled when `server` is None.

    `takes_anybody`: we dialled an address without knowing whose it is; whichever key TLS proves there is the server.
    `who` names the other side in errors; `draw` makes random bytes; `now` is when the connection began.
    """

    def __init__(
        self,
        me: Self,
        server: PeerId | None,
        who: str,
        draw: Callable[[int], bytes],
        now: float,
        *,
        takes_anybody: bool = False,
    ) -> None:
        self.deadline = now + HELLO_TIMEOUT_S
        self.is_shown = False
        """Our proof went out: from now on the other side may count on this connection although we do not yet."""
        self.early: list[EarlyData] = []
        self._me = me
        self._server = server
        self._is_client = server is not None or takes_anybody
        self._who = who
        self._draw = draw
        self._begun = now
        self._early_bytes = 0
        self._hello: ClientHello | ServerHello | None = None

    def tls_done(
        self, mine: x509.Certificate, theirs: x509.Certificate | None, chain: Sequence[x509.Certificate], now: float
    ) -> list[Action]:
        """TLS is over: `mine` was our certificate, `theirs` the other side's (None: it sent none)."""
        try:
            key = None if theirs is None else certificate_key(theirs, chain)
        except MeshswarmError as error:
            return self._fail(RemoteProtocolError(f"{self._who}: {error}"))
        if not self._is_client:
            self._hello = ServerHello(self._me, key, certificate_hash(mine), self._draw, self._begun, self._who)
            return []
        if theirs is None or key is None or self._server not in (None, key):
            found = "nobody with a certificate" if key is None else f"peer {key.short}"
            return self._fail(PeerUnreachableError(f"{self._who} is somebody else: {found} answers there"))
        if key == self._me.identity.peer_id:
            return self._fail(PeerUnreachableError(f"{self._who} is this very peer"))
        self._hello = ClientHello(self._me, key, certificate_hash(theirs), self._draw(NONCE_BYTES), now)
        return self._hello.start()

    def receive(self, frame: bytes, now: float) -> list[Action]:
        """A frame on the HELLO stream."""
        if self._hello is None:
            return self.receive_early(0, frame, False)
        actions = self._hello.receive(frame, now)
        if any(isinstance(action, Send) for action in actions) and isinstance(self._hello, ClientHello):
            self.is_shown = True
        return actions

    def receive_early(self, stream_id: int, data: bytes, end: bool) -> list[Action]:
        """Data on another stream before HELLO is over."""
        self._early_bytes += len(data)
        if self._is_client and self.is_shown and self._early_bytes <= MAX_EARLY_BYTES:
            self.early.append((stream_id, data, end))
            return []
        return self._fail(RemoteProtocolError(f"{self._who} sent data before HELLO was over"))

    def expire(self, now: float) -> list[Action]:
        """Call at `deadline`."""
        if now < self.deadline or (self._hello is not None and self._hello.is_over):
            return []
        step = "TLS" if self._hello is None else "HELLO"
        return self._fail(PeerUnreachableError(f"{self._who} was silent in {step} for {HELLO_TIMEOUT_S:g} s"))

    def _fail(self, error: MeshswarmError) -> list[Action]:
        return [Failed(CloseCode.HELLO_FAILED, error)]

"""HELLO: how two peers prove their keys and their swarm before anything else is said. Pure code, no sockets.

    1. client: versions, nonce_c, key_c                2. server: version, nonce_s
    3. client: signature, tag, agent, ...              4. server: the same, as the server

Both signatures and tags cover the same fields: both keys, both nonces, the hash of the server's certificate, and the
hash of messages 1 and 2 exactly as they were sent, so that nobody in between can lower the version. The client shows
its swarm's tag first; while a swarm's key is being changed, tags under the older keys go along. Either side refuses a
peer whom its swarm does not admit, with the right tag too. The rule this file keeps: whatever a client gets wrong, the
server answers with one code.
Signatures are made for "hello-client" and "hello-server", tags for the role, so neither can be sent back to its maker.

A state machine takes frames and the time and returns actions: `Send`, then at the end one `Established` or `Failed`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgpack

from meshswarm.errors import MeshswarmError, PeerUnreachableError, RemoteProtocolError
from meshswarm.identity import KEY_BYTES, Identity, PeerId
from meshswarm.net.codes import CloseCode
from meshswarm.net.swarm import MAX_SWARM_KEYS, Role, Swarm

HELLO_TIMEOUT_S = 5.0
MAX_HELLO_BYTES = 1024
NONCE_BYTES = 32
MAX_AGENT_CHARS = 64
MAX_OBSERVED_CHARS = 64
INSTANCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Protocol versions from `lowest` to `highest`, both included."""

    lowest: int
    highest: int

    def best_common(self, other: VersionRange) -> int | None:
        best = min(self.highest, other.highest)
        return best if best >= max(self.lowest, other.lowest) else None

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


VERSIONS = VersionRange(1, 1)


@dataclass(frozen=True, slots=True)
class Send:
    """Send `frame` on the HELLO stream."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Established:
    """The other side is `peer`, in our swarm. `agent` is what software it says it is; `observed` is our address as it
    sees it ("" when it did not say): a claim, to be believed when several agree. `instance` is drawn anew whenever a
    peer starts: connections to an earlier instance of it lead nowhere any more."""

    peer: PeerId
    version: int
    agent: str
    observed: str
    instance: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """Close the connection with `code`. `error` is for this side's log and callers, never for the other side."""

    code: CloseCode
    error: MeshswarmError


Action = Send | Established | Failed


@dataclass(frozen=True, slots=True)
class Self:
    """What this side brings to a HELLO. `observed` is the other side's address as we see it."""

    identity: Identity
    swarm: Swarm
    agent: str
    observed: str = ""
    instance: bytes = bytes(INSTANCE_BYTES)
    versions: VersionRange = VERSIONS


class _State(Enum):
    NEW = "new"
    AWAIT_FIRST = "await first"
    AWAIT_PROOF = "await proof"
    OVER = "over"


class _Hello:
    """What both roles share: the deadline, the end, and turning any malformed message into one failure."""

    def __init__(self, me: Self, role: Role, now: float, who: str) -> None:
        self._me = me
        self._role = role
        self._who = who
        self._state = _State.NEW
        self.deadline = now + HELLO_TIMEOUT_S

    @property
    def is_over(self) -> bool:
        return self._state is _State.OVER

    def expire(self, now: float) -> list[Action]:
        """Call at `deadline`: a HELLO that is not over by then has failed."""
        if self.is_over or now < self.deadline:
            return []
        error = PeerUnreachableError(f"{self._who} was silent in HELLO for {HELLO_TIMEOUT_S:g} s")
        return self._fail(error)

    def receive(self, frame: bytes, now: float) -> list[Action]:
        """Handle one frame of the HELLO stream."""
        if self.is_over:
            return []
        if now >= self.deadline:
            return self.expire(now)
        try:
            return self._handle(_unpack(frame), frame)
        except (ValueError, TypeError, KeyError) as error:
            return self._fail(RemoteProtocolError(f"{self._who} sent a malformed HELLO: {error}"))

    def receive_early(self) -> list[Action]:
        """Something came on another stream although HELLO is not over."""
        return self._fail(RemoteProtocolError(f"{self._who} sent data before HELLO was over"))

    def _handle(self, message: dict[str, Any], frame: bytes) -> list[Action]:
        raise NotImplementedError

    def _fail(self, error: MeshswarmError, code: CloseCode = CloseCode.HELLO_FAILED) -> list[Action]:
        if self.is_over:
            return []
        self._state = _State.OVER
        return [Failed(code, error)]

    def _proof(self, fields: bytes) -> bytes:
        me = self._me
        proof: dict[str, Any] = {
            "signature": me.identity.sign(f"hello-{self._role}", fields),
            "tag": me.swarm.tag(self._role, fields),
            "agent": me.agent[:MAX_AGENT_CHARS],
            "observed": me.observed[:MAX_OBSERVED_CHARS],
            "instance": me.instance,
        }
        if older := me.swarm.older_tags(self._role, fields):
            proof["older_tags"] = older
        return _pack(proof)

    def _check_proof(self, message: dict[str, Any], peer: PeerId, fields: bytes, version: int) -> Established | None:
        """None when anything is wrong; all of it is checked every time, so that timing does not tell which."""
        role = Role.SERVER if self._role is Role.CLIENT else Role.CLIENT
        agent = _text(message, "agent", MAX_AGENT_CHARS)
        observed = _text(message, "observed", MAX_OBSERVED_CHARS)
        instance = _bytes(message, "instance", INSTANCE_BYTES)
        signed = peer.verify(f"hello-{role}", fields, _bytes(message, "signature", 64))
        admitted = self._me.swarm.admits_tags(peer, role, fields, [_bytes(message, "tag", 32), *_older_tags(message)])
        return Established(peer, version, agent, observed, instance) if signed and admitted else None


class ClientHello(_Hello):
    """The side that dialled `server`, whose TLS certificate (DER hash `certificate_hash`) carries that very key."""

    def __init__(self, me: Self, server: PeerId, certificate_hash: bytes, nonce: bytes, now: float) -> None:
        super().__init__(me, Role.CLIENT, now, f"peer {server.short}")
        self._server = server
        self._certificate_hash = certificate_hash
        self._nonce = nonce
        self._first = b""
        self._fields = b""
        self._version = 0

    def start(self) -> list[Action]:
        versions = [self._me.versions.lowest, self._me.versions.highest]
        key = self._me.identity.peer_id.key
        self._first = _pack({"versions": versions, "nonce": self._nonce, "key": key})
        self._state = _State.AWAIT_FIRST
        return [Send(self._first)]

    def _handle(self, message: dict[str, Any], frame: bytes) -> list[Action]:
        if self._state is _State.AWAIT_FIRST:
            version = _integer(message, "version")
            if not self._me.versions.lowest <= version <= self._me.versions.highest:
                return self._fail(RemoteProtocolError(f"{self._who} chose protocol version {version}, never offered"))
            self._version = version
            me, nonce = self._me.identity.peer_id, _bytes(message, "nonce", NONCE_BYTES)
            self._fields = _fields(me, self._server, self._nonce, nonce, self._certificate_hash, self._first, frame)
            self._state = _State.AWAIT_PROOF
            return [Send(self._proof(self._fields))]
        established = self._check_proof(message, self._server, self._fields, self._version)
        if established is None:
            return self._fail(RemoteProtocolError(f"{self._who} could not prove its key and our swarm in HELLO"))
        self._state = _State.OVER
        return [established]


class ServerHello(_Hello):
    """The side that was dialled. `certificate_key` is the client's key as TLS proved it, or None when TLS brought no
    certificate: the signature in HELLO suffices alone, but it must not contradict TLS. `draw` makes random bytes."""

    def __init__(
        self,
        me: Self,
        certificate_key: PeerId | None,
        certificate_hash: bytes,
        draw: Callable[[int], bytes],
        now: float,
        who: str = "a client",
    ) -> None:
        super().__init__(me, Role.SERVER, now, who)
        self._certificate_key = certificate_key
        self._certificate_hash = certificate_hash
        self._nonce = draw(NONCE_BYTES)
        self._client: PeerId | None = None
        self._fields = b""
        self._version = 0
        self._state = _State.AWAIT_FIRST

    def _handle(self, message: dict[str, Any], frame: bytes) -> list[Action]:
        if self._client is None:
            return self._handle_first(message, frame)
        contradicts = self._certificate_key is not None and not hmac.compare_digest(
            self._certificate_key.key, self._client.key
        )
        established = self._check_proof(message, self._client, self._fields, self._version)
        if established is None or contradicts:
            return self._fail(RemoteProtocolError(f"{self._who} could not prove its key and our swarm in HELLO"))
        self._state = _State.OVER
        return [Send(self._proof(self._fields)), established]

    def _handle_first(self, message: dict[str, Any], frame: bytes) -> list[Action]:
        lowest, highest = message["versions"]
        if type(lowest) is not int or type(highest) is not int:
            raise ValueError("versions are not integers")
        version = self._me.versions.best_common(VersionRange(lowest, highest))
        if version is None:
            error = RemoteProtocolError(
                f"{self._who} speaks protocol versions {VersionRange(lowest, highest)}, we speak {self._me.versions}"
            )
            return self._fail(error, CloseCode.NO_COMMON_VERSION)
        self._version = version
        nonce = _bytes(message, "nonce", NONCE_BYTES)
        client = PeerId(_bytes(message, "key", KEY_BYTES))
        answer = _pack({"version": version, "nonce": self._nonce})
        server = self._me.identity.peer_id
        self._fields = _fields(client, server, nonce, self._nonce, self._certificate_hash, frame, answer)
        self._client = client
        self._state = _State.AWAIT_PROOF
        return [Send(answer)]


def _fields(
    client: PeerId, server: PeerId, nonce_c: bytes, nonce_s: bytes, certificate_hash: bytes, first: bytes, second: bytes
) -> bytes:
    """What both sides sign: every part has a fixed length, so no two HELLOs share these bytes."""
    messages = hashlib.sha256(len(first).to_bytes(4, "big") + first + second).digest()
    return client.key + server.key + nonce_c + nonce_s + certificate_hash + messages


def _pack(message: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


def _unpack(frame: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(frame, max_map_len=16, max_array_len=16)
    except (msgpack.UnpackException, RecursionError) as error:
        raise ValueError("it is not msgpack") from error
    if not isinstance(message, dict):
        raise ValueError("it is not a map")
    return message


def _bytes(message: dict[str, Any], name: str, length: int) -> bytes:
    value = message[name]
    if not isinstance(value, bytes) or len(value) != length:
        raise ValueError(f"{name} is not {length} bytes")
    return value


def _older_tags(message: dict[str, Any]) -> list[bytes]:
    tags = message.get("older_tags", [])
    if not isinstance(tags, list) or len(tags) >= MAX_SWARM_KEYS:
        raise ValueError("older_tags is not a short list")
    if not all(isinstance(tag, bytes) and len(tag) == 32 for tag in tags):
        raise ValueError("an older tag is not 32 bytes")
    return tags


def _integer(message: dict[str, Any], name: str) -> int:
    value = message[name]
    if type(value) is not int:
        raise ValueError(f"{name} is not an integer")
    return value


def _text(message: dict[str, Any], name: str, max_chars: int) -> str:
    value = message[name]
    if not isinstance(value, str) or len(value) > max_chars or not (value.isprintable() or value == ""):
        raise ValueError(f"{name} is not a short printable text")
    return value

"""An invite: all that a machine needs to enter a private swarm, as one word to copy, to mail or to make a QR code of.

    meshswarm1x + base32(payload + 4 bytes of its hash)

The word has letters and digits only, so that a double click selects it; case, spaces and line breaks are ignored. The
rule this file keeps: a damaged invite, or one of another version, is refused with a sentence that says which it is.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass, field

from meshswarm.config import Address, packed_host
from meshswarm.dht import wire
from meshswarm.dht.wire import WireError
from meshswarm.errors import ConfigError
from meshswarm.identity import PeerId
from meshswarm.membership.names import checked_name
from meshswarm.net.swarm import SWARM_KEY_BYTES

INVITE_VERSION = 1
MAX_INVITED_PEERS = 4
MAX_PEER_ADDRESSES = 4
MAX_INVITE_CHARS = 4096
_CHECKSUM_BYTES = 4

Invited = tuple[PeerId, tuple[Address, ...]]


def looks_like_invite(text: str) -> bool:
    """Whether somebody meant this to be an invite, of whatever version."""
    return re.match(r"\s*meshswarm\d+x", text, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class Invite:
    """`name`: what the swarm is called. `key`: the one in use. `lineage`: the first key it had. `owner`: who signs its
    member list. `number`: of that list, when the invite was made. `peers`: members to join by, and their addresses."""

    name: str
    key: bytes = field(repr=False)
    lineage: bytes = field(repr=False)
    owner: PeerId
    number: int = 0
    peers: tuple[Invited, ...] = ()

    def encode(self) -> str:
        peers = [
            [peer.key, [packed for address in addresses[:MAX_PEER_ADDRESSES] if (packed := _pack_address(address))]]
            for peer, addresses in self.peers[:MAX_INVITED_PEERS]
        ]
        lineage = b"" if self.lineage == self.key else self.lineage
        payload = wire.pack([self.name, self.key, lineage, self.owner.key, self.number, peers])
        coded = base64.b32encode(payload + _checksum(payload)).decode().rstrip("=").lower()
        return f"meshswarm{INVITE_VERSION}x{coded}"

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Raises ConfigError with a sentence for a person; it never repeats the invite, which is a secret."""
        if len(text) > 4 * MAX_INVITE_CHARS:
            raise ConfigError("this is no invite: it is far too long")
        word = re.sub(r"\s+", "", text).lower()
        match = re.fullmatch(r"meshswarm(\d{1,4})x([a-z0-9]+)", word)
        if match is None or len(word) > MAX_INVITE_CHARS:
            raise ConfigError(
                f"this is no invite: one begins with 'meshswarm{INVITE_VERSION}x'; `meshswarm swarm invite` prints it"
            )
        if int(match[1]) != INVITE_VERSION:
            raise ConfigError(
                f"this invite has version {int(match[1])} and this meshswarm reads version {INVITE_VERSION}: the older "
                "of the two programs must be upgraded"
            )
        return _open(match[2])


def _open(coded: str) -> Invite:
    damaged = ConfigError(
        "this invite is damaged: a part is missing or was changed on its way; copy the whole of it again"
    )
    try:
        raw = base64.b32decode(coded.upper() + "=" * (-len(coded) % 8))
    except ValueError:
        raise damaged from None
    payload, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(_checksum(payload), checksum):
        raise damaged
    try:
        name, key, lineage, owner, number, peers, *_ = wire.array(
            wire.unpack_array(payload, MAX_INVITE_CHARS, "an invite"), "an invite", at_least=6
        )
        key = wire.binary(key, "key", size=SWARM_KEY_BYTES)
        lineage = wire.binary(lineage, "lineage", at_most=SWARM_KEY_BYTES)
        if lineage:
            wire.binary(lineage, "lineage", size=SWARM_KEY_BYTES)
        return Invite(
            checked_name(wire.text(name, "name", at_most=64)),
            key,
            lineage or key,
            wire.peer_id(owner, "owner"),
            wire.integer(number, "number"),
            tuple(_peer(entry) for entry in wire.array(peers, "peers", at_most=MAX_INVITED_PEERS)),
        )
    except WireError as error:  # a right checksum over nonsense: made so on purpose, or by a program with a fault
        raise ConfigError(f"this invite makes no sense: {error}") from None


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(b"meshswarm/invite/1\0" + payload).digest()[:_CHECKSUM_BYTES]


def _pack_address(address: Address) -> bytes | str:
    """6 or 18 bytes for an IP address and its port; a host name, which the inviting person chose, as text."""
    packed = packed_host(address.host)
    return str(address) if packed is None else packed + address.port.to_bytes(2)


def _peer(entry: object) -> Invited:
    peer, addresses, *_ = wire.array(entry, "a peer", at_least=2)
    found = [_address(each) for each in wire.array(addresses, "addresses", at_most=MAX_PEER_ADDRESSES)]
    return wire.peer_id(peer, "a peer"), tuple(found)


def _address(value: object) -> Address:
    if isinstance(value, str):
        try:
            return Address.parse(value)
        except ValueError as error:
            raise WireError(str(error)) from None
    packed = wire.binary(value, "an address", at_most=18)
    if len(packed) not in (6, 18):
        raise WireError("an address has the wrong length")
    return wire.addresses([[packed[:-2], int.from_bytes(packed[-2:])]], "an address")[0]

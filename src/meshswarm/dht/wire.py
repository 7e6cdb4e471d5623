"""Reading what strangers sent: msgpack with hard limits, and one check for every field.

The rule this file keeps: nothing that came from another peer is used before it passed one of the functions here. Each
of them raises `WireError`, which names the field, and never anything else.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any

import msgpack

from meshswarm.config import Address, packed_host
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import KEY_BYTES, PeerId

MAX_ADDRESSES = 8
MAX_INT = 2**53  # what JSON readers of a listing still hold exactly
_MAX_ITEMS = 1024  # of one msgpack array; the checks of each message are tighter


class WireError(RemoteProtocolError):
    """Bytes of another peer that are not what they should be."""


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack_array(data: bytes, max_bytes: int, what: str) -> list[Any]:
    """The msgpack array that `data` is, whole: no maps, no extension types, nothing behind it."""
    if len(data) > max_bytes:
        raise WireError(f"{what} of {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            max_array_len=_MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"{what} that is not msgpack: {type(error).__name__}") from None
    return array(value, what)


def array(value: object, what: str, *, at_least: int = 0, at_most: int = _MAX_ITEMS) -> list[Any]:
    if not isinstance(value, list) or not at_least <= len(value) <= at_most:
        raise WireError(f"{what} is not a list of {at_least} to {at_most} items")
    return value


def integer(value: object, what: str, *, low: int = 0, high: int = MAX_INT) -> int:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{what} is not an integer from {low} to {high}")
    return value


def boolean(value: object, what: str) -> bool:
    if type(value) is not bool:
        raise WireError(f"{what} is not true or false")
    return value


def binary(value: object, what: str, *, size: int | None = None, at_most: int = 2**20) -> bytes:
    if type(value) is not bytes or len(value) > at_most or (size is not None and len(value) != size):
        raise WireError(f"{what} is not {'at most ' + str(at_most) if size is None else size} bytes")
    return value


def text(value: object, what: str, *, at_most: int) -> str:
    if type(value) is not str or len(value) > at_most:
        raise WireError(f"{what} is not a text of at most {at_most} characters")
    return value


def peer_id(value: object, what: str) -> PeerId:
    return PeerId(binary(value, what, size=KEY_BYTES))


def addresses(value: object, what: str) -> tuple[Address, ...]:
    """At most `MAX_ADDRESSES` pairs of a packed IP address and a port.

    Host names never travel: resolving one that a stranger chose would let him aim this peer's resolver.
    """
    return tuple(_address(item, what) for item in array(value, what, at_most=MAX_ADDRESSES))


def pack_addresses(values: tuple[Address, ...]) -> list[list[object]]:
    """The wire form of those `values` that another peer can use; the others are left out."""
    hosts = [(packed_host(value.host), value.port) for value in values]
    return [[raw, port] for raw, port in hosts if raw is not None and port > 0][:MAX_ADDRESSES]


@lru_cache(maxsize=4096)
def _host(raw: bytes) -> str | None:
    if len(raw) not in (4, 16):
        return None
    host = str(ipaddress.ip_address(raw))
    return None if packed_host(host) is None else host


def _address(item: object, what: str) -> Address:
    pair = array(item, what, at_least=2, at_most=2)
    host = _host(binary(pair[0], what, at_most=16))
    if host is None:
        raise WireError(f"{what} holds something that is not one host's IP address")
    return _checked_address(host, integer(pair[1], what, low=1, high=65535))


@lru_cache(maxsize=16384)
def _checked_address(host: str, port: int) -> Address:
    return Address(host, port)

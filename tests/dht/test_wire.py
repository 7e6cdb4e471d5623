"""Bytes of strangers: every shape that is wrong is a WireError and nothing else."""

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.dht import wire
from meshswarm.dht.wire import WireError


@given(st.binary(max_size=300))
def test_any_bytes_are_an_array_or_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(wire.unpack_array(data, 256, "it"), list)


@pytest.mark.parametrize(
    "value",
    [{}, {"a": 1}, "text", 5, None, msgpack.ExtType(1, b"x"), [[{"a": 1}]], [msgpack.ExtType(5, b"abc")]],
)
def test_maps_and_extensions_are_refused_at_any_depth(value: object) -> None:
    with pytest.raises(WireError):
        wire.unpack_array(msgpack.packb(value), 1000, "it")


def test_lengths_that_promise_more_than_there_is_are_refused() -> None:
    for lie in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdc\xff\xff" + b"\x90" * 100, b"\x91" * 1000):
        with pytest.raises(WireError):
            wire.unpack_array(lie, 2000, "it")


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(WireError):
        wire.unpack_array(wire.pack([1]) + b"\x00", 100, "it")


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 11])
def test_an_integer_is_an_integer_in_its_range(value: object) -> None:
    with pytest.raises(WireError, match="count"):
        wire.integer(value, "count", high=10)


@pytest.mark.parametrize("value", [1, 0, None, "true"])
def test_a_boolean_is_a_boolean(value: object) -> None:
    with pytest.raises(WireError):
        wire.boolean(value, "flag")


def test_addresses_come_back_as_they_were() -> None:
    given_addresses = (Address("127.0.0.1", 1), Address("2001:db8::1", 65535))
    assert wire.addresses(wire.pack_addresses(given_addresses), "it") == given_addresses


def test_what_others_cannot_dial_is_never_sent() -> None:
    useless = (Address("example.org", 1), Address("0.0.0.0", 1), Address("::", 1), Address("fe80::1%eth0", 1))
    assert wire.pack_addresses((*useless, Address("10.0.0.1", 0), Address("224.0.0.1", 5))) == []


@pytest.mark.parametrize(
    "item",
    [
        [b"\x7f\x00\x00\x01", 0],
        [b"\x7f\x00\x00\x01", 65536],
        [b"\x7f\x00\x00\x01", True],
        [b"\x7f\x00\x00", 1],
        ["127.0.0.1", 1],
        [b"\x00" * 4, 1],
        [b"\xff\x02" + bytes(14), 1],
        [b"\x7f\x00\x00\x01"],
        [b"\x7f\x00\x00\x01", 1, 1],
        5,
    ],
)
def test_a_bad_address_is_refused(item: object) -> None:
    with pytest.raises(WireError):
        wire.addresses([item], "it")


def test_too_many_addresses_are_refused() -> None:
    with pytest.raises(WireError):
        wire.addresses([[b"\x7f\x00\x00\x01", 1]] * (wire.MAX_ADDRESSES + 1), "it")

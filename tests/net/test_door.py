"""Datagrams of strangers: what is answered, what is let in, and what is not worth a byte."""

from __future__ import annotations

import os

import pytest
from aioquic.buffer import Buffer
from aioquic.quic.packet import QuicPacketType, QuicProtocolVersion, pull_quic_header
from hypothesis import given
from hypothesis import strategies as st
from tests.net.wires import CLIENT_ADDRESS, SERVER_ADDRESS, configuration

from meshswarm.identity import Identity
from meshswarm.net.admission import Admission, Limits
from meshswarm.net.door import Door, Guest, Reply, destination
from meshswarm.net.quic import PeerConnection

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
SERVER = configuration(BOB, is_client=False)


def door(**limits: int) -> Door:
    return Door(SERVER, Admission(Limits(**limits)))


def first_packet(*versions: int) -> tuple[PeerConnection, bytes]:
    settings = configuration(ALICE, is_client=True)
    if versions:
        settings.supported_versions = list(versions)
    client = PeerConnection(settings)
    client.connect(SERVER_ADDRESS, 0.0)
    ((datagram, _),) = client.datagrams_to_send(0.0)
    return client, datagram


def test_a_first_packet_makes_a_guest_under_the_id_it_chose() -> None:
    client, datagram = first_packet()
    guest = door().knock(datagram, CLIENT_ADDRESS, 0.0)
    assert isinstance(guest, Guest)
    assert guest.first_id == client.original_destination_connection_id == destination(datagram)


def test_a_short_first_packet_is_dropped() -> None:
    _, datagram = first_packet()
    assert door().knock(datagram[:1199], CLIENT_ADDRESS, 0.0) is None


def test_an_unknown_version_is_told_ours_and_no_more_than_it_sent() -> None:
    _, datagram = first_packet(QuicProtocolVersion.VERSION_2)
    reply = door().knock(datagram, CLIENT_ADDRESS, 0.0)
    assert isinstance(reply, Reply) and len(reply.datagram) < len(datagram)
    header = pull_quic_header(Buffer(data=reply.datagram), host_cid_length=8)
    assert header.packet_type is QuicPacketType.VERSION_NEGOTIATION
    assert header.supported_versions == [QuicProtocolVersion.VERSION_1]
    assert door().knock(reply.datagram.ljust(1200, b"\0"), CLIENT_ADDRESS, 0.0) is None  # never an answer to an answer


def test_when_many_are_half_open_a_stranger_must_come_back_with_a_token_from_the_same_address() -> None:
    busy = door(retry_above_half_open=0)
    client, datagram = first_packet()
    retry = busy.knock(datagram, CLIENT_ADDRESS, 0.0)
    assert isinstance(retry, Reply) and len(retry.datagram) < len(datagram)
    client.receive_datagram(retry.datagram, SERVER_ADDRESS, 0.1)
    ((again, _),) = client.datagrams_to_send(0.1)
    assert isinstance(busy.knock(again, CLIENT_ADDRESS, 0.2), Guest)
    assert isinstance(busy.knock(again, ("192.0.2.9", 1), 0.2), Reply)
    assert isinstance(busy.knock(again, CLIENT_ADDRESS, 99.0), Reply)
    assert isinstance(door(retry_above_half_open=0).knock(again, CLIENT_ADDRESS, 0.2), Reply)  # another server's token


def test_a_full_house_does_not_answer() -> None:
    _, datagram = first_packet()
    assert door(max_connections=0).knock(datagram, CLIENT_ADDRESS, 0.0) is None


@pytest.mark.parametrize("first", [0x40, 0xD0, 0xE0, 0xF0])
def test_anything_but_a_first_packet_is_dropped(first: int) -> None:
    noise = bytes([first]) + QuicProtocolVersion.VERSION_1.to_bytes(4, "big") + b"\x08" + os.urandom(1300)
    assert door().knock(noise, CLIENT_ADDRESS, 0.0) is None


@given(st.binary(max_size=1400))
def test_no_noise_is_answered_with_more_than_it_brought(noise: bytes) -> None:
    answer = door().knock(noise, CLIENT_ADDRESS, 0.0)
    assert (
        answer is None
        or (isinstance(answer, Reply) and len(answer.datagram) <= len(noise))
        or isinstance(answer, Guest)
    )
    connection_id = destination(noise)
    assert connection_id is None or connection_id in noise

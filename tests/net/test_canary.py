"""The private parts of aioquic that `net.quic` relies on: each test names what broke when a release moved one."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted
from tests.net.wires import Wire, configuration

from meshswarm.identity import Identity
from meshswarm.net import quic
from meshswarm.net.certificate import certificate_key
from meshswarm.net.congestion import BurstPacer, WindowControl

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
MALLORY = Identity.from_seed(b"m" * 32)


def test_every_private_part_is_there() -> None:
    quic.check_private_parts(quic.sample_parts())


@pytest.mark.parametrize(("owner", "name"), [(owner, names[0]) for owner, names in quic._PRIVATE_PARTS.items()])
def test_a_part_that_moved_is_named_with_what_to_do(owner: str, name: str) -> None:
    parts: dict[str, Any] = quic.sample_parts()
    parts[owner] = SimpleNamespace(**{other: None for other in quic._PRIVATE_PARTS[owner] if other != name})
    with pytest.raises(quic.IncompatibleAioquicError, match=rf"has no {owner}.{name} any more; .*pip install"):
        quic.check_private_parts(parts)


def completed(wire: Wire) -> list[HandshakeCompleted]:
    return [event for side in (0, 1) for event in wire.events[side] if isinstance(event, HandshakeCompleted)]


def test_the_server_gets_the_clients_certificate_and_each_side_the_others_key() -> None:
    wire = Wire.connect(ALICE, BOB)
    assert wire.run(lambda: len(completed(wire)) == 2)
    for side, other in ((wire.server, ALICE), (wire.client, BOB)):
        certificate, chain = side.peer_certificates
        assert certificate is not None
        assert certificate_key(certificate, chain) == other.peer_id


def test_without_a_client_certificate_the_handshake_completes_and_there_is_none() -> None:
    settings = configuration(ALICE, is_client=True)
    settings.certificate = settings.private_key = None
    wire = Wire.join(settings, configuration(BOB, is_client=False))
    assert wire.run(lambda: len(completed(wire)) == 2)
    assert wire.server.peer_certificates == (None, [])


@pytest.mark.parametrize("thief", ["client", "server"])
def test_a_stolen_certificate_without_its_key_is_refused_by_tls(thief: str) -> None:
    settings = {"client": configuration(ALICE, is_client=True), "server": configuration(BOB, is_client=False)}
    settings[thief].private_key = MALLORY.private_key
    wire = Wire.join(settings["client"], settings["server"])
    honest = wire.server if thief == "client" else wire.client
    assert wire.run(lambda: honest.close_event is not None)
    assert honest.close_event is not None
    assert honest.close_event.error_code == 0x100 + tls.AlertDescription.decrypt_error


def test_no_session_ticket_is_ever_offered_or_used() -> None:
    wire = Wire.connect(ALICE, BOB)
    assert wire.run(lambda: len(completed(wire)) == 2)
    assert not any(event.session_resumed or event.early_data_accepted for event in completed(wire))
    assert wire.client.tls.new_session_ticket_cb is None and wire.server.tls.get_session_ticket_cb is None


def test_no_server_name_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    hellos: list[tls.ClientHello] = []
    pull = tls.pull_client_hello
    monkeypatch.setattr(tls, "pull_client_hello", lambda buffer: hellos.append(hello := pull(buffer)) or hello)
    wire = Wire.connect(ALICE, BOB)
    assert wire.run(lambda: len(completed(wire)) == 2)
    assert [hello.server_name for hello in hellos] == [None]


def test_our_congestion_window_and_pacer_are_the_ones_in_use() -> None:
    wire = Wire.connect(ALICE, BOB)
    assert wire.run(lambda: len(completed(wire)) == 2)
    for side in (wire.client, wire.server):
        assert isinstance(side._loss._cc, WindowControl)
        assert isinstance(side._loss._pacer, BurstPacer)
        assert side._loss._pacer.packet_time is not None


def test_aioquics_own_datagrams_stay_within_what_a_14_bit_stream_length_allows() -> None:
    """aioquic would write a wrong length without a word: the largest datagram must stay just below that."""
    header, tag, smallest_frame_header = 3 + quic.CID_BYTES, 16, 4
    assert quic.AIOQUIC_MAX_DATAGRAM_BYTES - header - tag - smallest_frame_header < 2**14


def test_aioquic_still_widens_its_windows_by_itself_so_ours_is_still_needed() -> None:
    connection = QuicConnection(configuration=QuicConfiguration(is_client=True, max_data=1000))
    assert "_write_connection_limits" in vars(quic.PeerConnection)
    assert "value *= 2" in _source(QuicConnection._write_connection_limits)
    assert copy.copy(connection._local_max_data).value == 1000


def test_aioquic_still_measures_acknowledgement_delay_by_one_attribute() -> None:
    assert "self._ack_delay" in _source(QuicConnection.receive_datagram)
    assert "space.ack_at <= now" in _source(QuicConnection._write_application)


def _source(function: Any) -> str:
    import inspect

    return inspect.getsource(function)

"""What happens to a datagram that belongs to no connection: dropped, answered without memory, or let in.

The rule this file keeps: nothing is remembered about a stranger before `admission` agreed, and no answer is larger than
what it answers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # re-exported without saying so
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler

from meshswarm.net.admission import Admission, Answer
from meshswarm.net.express import ExpressConnection
from meshswarm.net.quic import CID_BYTES


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this back and forget about it."""

    datagram: bytes


@dataclass(frozen=True, slots=True)
class Guest:
    """A new connection; its first datagrams come under `first_id`, which the client chose."""

    quic: ExpressConnection
    first_id: bytes


def destination(data: bytes) -> bytes | None:
    """The connection id that a datagram is for; None when it is too short to have one."""
    if len(data) <= CID_BYTES:
        return None
    if data[0] & 0x80 == 0:
        return data[1 : 1 + CID_BYTES]
    length = data[5]
    return data[6 : 6 + length] if len(data) >= 6 + length else None


class Door:
    """Answers strangers with the server's `configuration`."""

    def __init__(self, configuration: QuicConfiguration, admission: Admission) -> None:
        self._configuration = configuration
        self._admission = admission
        self._tokens = QuicRetryTokenHandler()

    def knock(self, data: bytes, sockaddr: Any, now: float) -> Reply | Guest | None:
        """A datagram for nobody we know."""
        if len(data) < SMALLEST_MAX_DATAGRAM_SIZE or data[0] & 0x80 == 0:
            return None
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CID_BYTES)
        except ValueError:
            return None
        if header.packet_type is QuicPacketType.VERSION_NEGOTIATION:
            return None
        if header.version not in self._configuration.supported_versions:
            return Reply(
                encode_quic_version_negotiation(
                    source_cid=header.destination_cid,
                    destination_cid=header.source_cid,
                    supported_versions=self._configuration.supported_versions,
                )
            )
        if header.packet_type is not QuicPacketType.INITIAL:
            return None
        return self._admit(header, sockaddr, now)

    def _admit(self, header: QuicHeader, sockaddr: Any, now: float) -> Reply | Guest | None:
        original = self._original_id(header, sockaddr, now)
        match self._admission.asks(sockaddr[0], has_token=original is not None):
            case Answer.REFUSE:
                return None
            case Answer.RETRY:
                return Reply(self._retry(header, sockaddr, now))
        if original is None:
            quic = ExpressConnection(self._configuration, original_destination=header.destination_cid)
        else:
            quic = ExpressConnection(
                self._configuration, original_destination=original, retry_source=header.destination_cid
            )
        return Guest(quic, header.destination_cid)

    def _original_id(self, header: QuicHeader, sockaddr: Any, now: float) -> bytes | None:
        """The connection id of the client's very first packet, from a valid retry token; None without one."""
        if not header.token:
            return None
        try:
            return self._tokens.validate_token(
                address=_plain(sockaddr), destination_cid=header.destination_cid, token=header.token, now=now
            )
        except ValueError:
            return None

    def _retry(self, header: QuicHeader, sockaddr: Any, now: float) -> bytes:
        source = os.urandom(CID_BYTES)
        token = self._tokens.create_token(
            address=_plain(sockaddr),
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source,
            now=now,
        )
        version = self._configuration.supported_versions[0]
        return encode_quic_retry(
            version=version,
            source_cid=source,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )


def _plain(sockaddr: Any) -> tuple[str, int]:
    return (sockaddr[0].partition("%")[0], sockaddr[1])

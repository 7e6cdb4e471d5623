"""What libtorrent's alerts mean here: plain values, taken from the C++ objects at once.

The rule this file keeps: nothing of libtorrent's leaves it but the handle that says which torrent is meant. An alert
is dead after the next batch; an event stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libtorrent as lt

MASK = (
    lt.alert_category.error
    | lt.alert_category.status
    | lt.alert_category.storage
    | lt.alert_category.peer
    | lt.alert_category.connect
    | lt.alert_category.piece_progress
)
"""All categories together would cost a tenth of the throughput and overflow the queue."""


@dataclass(frozen=True, slots=True)
class Added:
    """The torrent is in the session. `fault` says why not, empty when it is."""

    info_hash: bytes
    fault: str


@dataclass(frozen=True, slots=True)
class Ready:
    """What was said to be on the disk is taken over, or was checked: pieces can be fetched, served and added."""


@dataclass(frozen=True, slots=True)
class Doubted:
    """What was said to be on the disk was not believed, so the whole file is being hashed."""

    reason: str


@dataclass(frozen=True, slots=True)
class PieceVerified:
    """A piece came and is right. Its bytes may not be on the disk yet."""

    piece: int


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """A piece came and is wrong, or what was to be served is not what it was."""

    piece: int


@dataclass(frozen=True, slots=True)
class PieceRead:
    """The bytes of a piece; None when they cannot be read."""

    piece: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Finished:
    """All that is wanted has come. libtorrent now flushes by itself, so one more `Flushed` follows."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything received before the flush began is on the disk."""


@dataclass(frozen=True, slots=True)
class Paused:
    """All connections are closed, and everything received is on the disk."""


@dataclass(frozen=True, slots=True)
class FileFault:
    """Reading or writing the file failed, or libtorrent has stopped the torrent. `code`: the errno, 0 for no such."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class DialledIn:
    """Somebody connected to this session's port; for which torrent is not known yet."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PeerJoined:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PeerLeft:
    host: str
    port: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerBanned:
    """libtorrent's opinion: a hint, since it often hits an honest peer that shared a piece with a liar."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Removed:
    """The torrent has left the session."""

    info_hash: bytes


@dataclass(frozen=True, slots=True)
class Status:
    """How a torrent does. Bytes since it was added, payload only; `pieces` where they were asked for."""

    done_bytes: int
    received_bytes: int
    sent_bytes: int
    down_bytes_s: int
    up_bytes_s: int
    n_peers: int
    is_ready: bool
    pieces: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class Listening:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ListenFailed:
    host: str
    port: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Alerts were lost because too many waited: everything must be asked for again."""


Event = (
    Added
    | Ready
    | Doubted
    | PieceVerified
    | PieceFailed
    | PieceRead
    | Finished
    | Flushed
    | Paused
    | FileFault
    | DialledIn
    | PeerJoined
    | PeerLeft
    | PeerBanned
    | Removed
    | Status
    | Listening
    | ListenFailed
    | Dropped
)

Handle = lt.torrent_handle
Translated = tuple[Handle | None, Event]


def translate(alert: Any) -> list[Translated]:
    """(torrent, event) for each thing an alert says; the torrent is None where it is about the session."""
    if isinstance(alert, lt.state_update_alert):
        return [(status.handle, _status(status)) for status in alert.status]
    if isinstance(alert, lt.torrent_removed_alert):
        return [(None, Removed(alert.info_hashes.v2.to_bytes()))]
    for kind, event_of in _OF_SESSION:
        if isinstance(alert, kind):
            return [(None, event_of(alert))]
    if isinstance(alert, lt.peer_disconnected_alert):  # of a torrent, or one that dialled in and named none
        left = _peer_left(alert)
        return [(alert.handle, left), (None, left)]
    event_of_torrent = _OF_TORRENT.get(type(alert))
    return [] if event_of_torrent is None else [(alert.handle, event_of_torrent(alert))]


def _status(status: Any) -> Status:
    pieces = list(status.pieces)
    return Status(
        done_bytes=status.total_done,
        received_bytes=status.total_payload_download,
        sent_bytes=status.total_payload_upload,
        down_bytes_s=status.download_payload_rate,
        up_bytes_s=status.upload_payload_rate,
        n_peers=status.num_peers,
        is_ready=status.state not in (lt.torrent_status.checking_files, lt.torrent_status.checking_resume_data),
        pieces=frozenset(index for index, has in enumerate(pieces) if has) if pieces else None,
    )


def _reason(error: Any) -> str:
    return str(error.message()) if error.value() else ""


def _file_fault(error: Any) -> FileFault:
    is_errno = error.category().name() in ("system", "generic")
    return FileFault(int(error.value()) if is_errno else 0, _reason(error))


def _peer_left(alert: Any) -> PeerLeft:
    host, port = alert.endpoint
    return PeerLeft(host, port, _reason(alert.error))


def _piece_read(alert: Any) -> PieceRead:
    failed = alert.error.value() != 0
    return PieceRead(int(alert.piece), None if failed else bytes(alert.buffer))


_OF_SESSION: tuple[tuple[type, Callable[[Any], Event]], ...] = (
    (lt.listen_succeeded_alert, lambda alert: Listening(str(alert.address), int(alert.port))),
    (lt.listen_failed_alert, lambda alert: ListenFailed(str(alert.address), int(alert.port), _reason(alert.error))),
    (lt.alerts_dropped_alert, lambda alert: Dropped()),
    (lt.incoming_connection_alert, lambda alert: DialledIn(*alert.endpoint)),
)
_OF_TORRENT: dict[type, Callable[[Any], Event]] = {
    lt.add_torrent_alert: lambda alert: Added(alert.params.info_hashes.v2.to_bytes(), _reason(alert.error)),
    lt.torrent_checked_alert: lambda alert: Ready(),
    lt.fastresume_rejected_alert: lambda alert: Doubted(_reason(alert.error)),
    lt.piece_finished_alert: lambda alert: PieceVerified(int(alert.piece_index)),
    lt.hash_failed_alert: lambda alert: PieceFailed(int(alert.piece_index)),
    lt.read_piece_alert: _piece_read,
    lt.torrent_finished_alert: lambda alert: Finished(),
    lt.cache_flushed_alert: lambda alert: Flushed(),
    lt.torrent_paused_alert: lambda alert: Paused(),
    lt.file_error_alert: lambda alert: _file_fault(alert.error),
    lt.torrent_error_alert: lambda alert: _file_fault(alert.error),
    lt.peer_connect_alert: lambda alert: PeerJoined(*alert.endpoint),
    lt.peer_error_alert: _peer_left,
    lt.peer_ban_alert: lambda alert: PeerBanned(*alert.endpoint),
}

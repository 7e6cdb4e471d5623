"""What may be in an error's message, whoever wrote it."""

import msgpack
import pytest

from meshswarm.dht.wire import WireError
from meshswarm.errors import (
    MAX_MESSAGE_CHARS,
    MAX_REMOTE_CHARS,
    ArtifactError,
    PeerUnreachableError,
    RefusedError,
    RemoteError,
    RemoteProtocolError,
    printable,
)
from meshswarm.identity import PeerId
from meshswarm.net.requests import Status, _open_reply

HOSTILE = "full\x1b[2J\x1b]0;owned\x07\nReady. Send your key to evil\r\u202egnp.exe\x9b31m\u2028\ud800"


def test_a_printable_text_is_left_as_it_is() -> None:
    for text in ("", "it took 300 µs, ça va, 你好", "two\nlines\tof it"):
        assert printable(text) == text
    assert printable("a\nb", keeps="") == "a\\nb"
    assert printable("x" * 11, 10) == "x" * 10 + "..."


def test_what_steers_a_terminal_is_shown_as_its_escapes() -> None:
    shown = printable(HOSTILE)
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert "\\x1b[2J" in shown and "\\u202e" in shown and "\\x9b31m" in shown and "\\ud800" in shown
    shown.encode()


@pytest.mark.parametrize("kind", [RemoteError, RefusedError, PeerUnreachableError, RemoteProtocolError, WireError])
def test_of_another_peer_comes_one_line_of_bounded_length(kind: type[RemoteError]) -> None:
    assert kind(HOSTILE, peer="who").peer == "who"
    assert str(kind(HOSTILE)).isprintable()
    assert len(str(kind("\x1b" * 10**6))) <= 4 * MAX_REMOTE_CHARS + 3


def test_of_a_file_or_a_server_come_no_control_characters_either() -> None:
    assert all(each.isprintable() or each == "\n" for each in str(ArtifactError(HOSTILE)))
    assert len(str(ArtifactError("y" * 10**6))) == MAX_MESSAGE_CHARS + 3


@pytest.mark.parametrize("status", [Status.REFUSED, Status.PROTOCOL])
def test_a_peer_that_answers_with_escapes_is_quoted_in_one_printable_line(status: Status) -> None:
    reply = bytes([status]) + msgpack.packb([HOSTILE.replace("\ud800", ""), None])
    with pytest.raises((RefusedError, RemoteProtocolError), match="full") as caught:
        _open_reply(reply, "model/header", PeerId(b"p" * 32), 1000)
    assert str(caught.value).isprintable()

"""A peer's lines get out in order, and a reader that does not read holds nobody up."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from meshswarm.commands.teller import MAX_LINES, Teller

PATIENCE_S = 10.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The end to read from, and the end to write to, which may be closed by the test."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", encoding="utf-8")
    try:
        yield reading, stream
    finally:
        with contextlib.suppress(OSError):
            os.close(reading)
        with contextlib.suppress(OSError):
            stream.close()


def fill(stream: TextIO) -> int:
    """Write to the pipe until it is full. Returns how many bytes that were."""
    descriptor, n_bytes = stream.fileno(), 0
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            n_bytes += os.write(descriptor, b"." * 4096)
    os.set_blocking(descriptor, True)
    return n_bytes


def read(descriptor: int, n_bytes: int) -> bytes:
    found = b""
    while len(found) < n_bytes:
        found += os.read(descriptor, n_bytes - len(found))
    return found


def test_lines_are_written_in_order(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    teller = Teller(stream)
    for number in range(100):
        teller.say(f"{number} µs")
    teller.close()
    stream.close()
    with os.fdopen(os.dup(reading), encoding="utf-8") as said:
        assert said.read() == "".join(f"{number} µs\n" for number in range(100))


def test_a_reader_that_does_not_read_holds_nobody_up_and_learns_what_it_missed(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    n_filled = fill(stream)
    teller = Teller(stream)

    def talk() -> None:
        for number in range(MAX_LINES + 11):
            teller.say(f"line {number}")

    talking = threading.Thread(target=talk, daemon=True)
    talking.start()
    talking.join(PATIENCE_S)
    assert not talking.is_alive(), "whoever said it waited for the reader"
    read(reading, n_filled)
    said = b""
    while b"lost here" not in said:
        said += os.read(reading, 4096)
    assert said.startswith(b"line 0\n")
    n_lost = int(said[: said.index(b" lines were lost")].rpartition(b"(")[2])
    assert n_lost in (10, 11), "all that had no room, of which one may have been in the writer's hands"


def test_the_end_does_not_wait_for_a_reader_that_does_not_read(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe
    fill(stream)
    teller = Teller(stream)
    teller.say("unheard")
    ending = threading.Thread(target=teller.close, args=(0.05,), daemon=True)
    ending.start()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()


def test_a_reader_that_is_gone_is_no_error(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    os.close(reading)
    teller = Teller(stream)
    teller.say("nobody hears this")
    teller.close()
    teller.say("nor this")


def test_the_log_goes_the_same_way(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    teller = Teller(stream)
    handler = logging.StreamHandler(teller)
    handler.emit(logging.LogRecord("x", logging.WARNING, "x.py", 1, "a note about %s is damaged", ("y",), None))
    teller.close()
    assert os.read(reading, 4096) == b"a note about y is damaged\n"


def test_nobodys_words_steer_the_terminal(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    teller = Teller(stream)
    log = logging.LogRecord("any", logging.WARNING, "", 0, "peer says %s", ("\x1b[31mred",), None)
    teller.say("a model named \x1b]0;owned\x07\nwith two lines")
    logging.StreamHandler(teller).emit(log)
    teller.close()
    stream.close()
    assert os.read(reading, 4096).decode().splitlines() == [
        "a model named \\x1b]0;owned\\x07",
        "with two lines",
        "peer says \\x1b[31mred",
    ]

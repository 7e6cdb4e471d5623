"""`models pull` by itself: what the reference decides, what a person sees. With peers: tests/e2e/test_artifacts.py"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from meshswarm.commands import pull as module
from meshswarm.commands.control import RunningPeer, announce_running
from meshswarm.commands.pull import pull, terminal_bar
from meshswarm.commands.throwaway import Where
from meshswarm.config import Address, Home, HomeLock
from meshswarm.errors import ConfigError, UnknownModelError
from meshswarm.identity import Identity


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


def test_a_path_is_taken_in_place_and_a_second_pull_finds_it(home: Home, tmp_path: Path, gguf_recipe: Any) -> None:
    path = gguf_recipe().write(tmp_path / "Tiny-1M.F32.gguf")
    told: list[Any] = []
    entry = pull(Where(home), str(path), told.append)
    assert entry["local"] and entry["name"] == "tiny-1m"
    assert {event["event"] for event in told} <= {"reading", "model"}
    assert pull(Where(home), "tiny-1m", told.append) == entry
    assert pull(Where(home), entry["model_id"], None) == entry
    assert not list(home.root.rglob("*.gguf"))


def test_what_names_no_model_is_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match="say which model"):
        pull(Where(home), " ", None)


def test_a_running_peer_is_asked_in_its_own_swarm_only(home: Home) -> None:
    lock = HomeLock(home)
    try:
        announce_running(home, "http://127.0.0.1:9/v1", None)
        where = Where(home, "another", False, ((Identity.generate().peer_id, Address("127.0.0.1", 4810)),))
        with pytest.raises(ConfigError, match="a peer is running in the folder"):
            pull(where, "some-model", None)
    finally:
        lock.release()


def test_of_two_that_begin_in_one_moment_the_second_waits_for_the_first(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other took the folder after this one had looked, and is gone again before it said where it is."""
    looks: list[Home] = []
    look = module._running

    def late(home: Home) -> RunningPeer | None:
        looks.append(home)
        return None if len(looks) == 1 else look(home)

    monkeypatch.setattr(module, "_running", late)
    other = HomeLock(home)
    threading.Timer(1.5, other.release).start()
    with pytest.raises(UnknownModelError, match="no-such-model"):
        pull(Where(home, f"test-{secrets.token_hex(4)}"), "no-such-model", None)
    assert len(looks) == 2


def test_who_found_a_pull_that_ends_at_that_moment_goes_on_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where(home, f"test-{secrets.token_hex(4)}")
    leaving = RunningPeer(os.getpid(), "http://127.0.0.1:9/v1", None, module._errand(where))
    found = [leaving]
    look = module._running
    monkeypatch.setattr(module, "_running", lambda home: found.pop() if found else look(home))
    with pytest.raises(UnknownModelError, match="no-such-model"):
        pull(where, "no-such-model", None)
    assert not found


EVENT = {
    "event": "fetching",
    "model": "m",
    "bytes": 50_000_000,
    "wanted_bytes": 100_000_000,
    "bytes_s": 10_000_000,
    "peers": 3,
    "web_bytes": 0,
    "eta_s": 5.0,
    "waits_s": None,
}


def test_on_a_terminal_one_line_is_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = terminal_bar()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    show(EVENT)
    show({**EVENT, "bytes": 100_000_000, "eta_s": None})
    show({"event": "model", "message": "Done."})
    bar, full, last = capsys.readouterr().err.lstrip("\r").split("\r")
    assert bar == "[############            ]  50 %  50 of 100 MB  10.0 MB/s from 3 peers, 5 s left"
    assert full.startswith("[########################] 100 %") and len(full) >= len(bar), (
        "nothing of the old line stays"
    )
    assert last.rstrip() == "Done." and last.endswith("\n")


def test_elsewhere_every_event_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    show = terminal_bar()
    show(EVENT)
    show({"event": "reading", "bytes": 1, "wanted_bytes": 2})
    assert capsys.readouterr().err == "Fetching m: 50 % of 100.0 MB, 10.0 MB/s from 3 peers, 5 s left\n"

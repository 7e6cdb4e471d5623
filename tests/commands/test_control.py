"""`running.json`: who may write it, who may take it away, and what it says when nobody runs."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from meshswarm.commands.control import RunningPeer, announce_running, find_running, forget_running
from meshswarm.config import Home, HomeLock
from meshswarm.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


def test_a_running_peer_is_found_as_long_as_it_holds_the_folder(home: Home) -> None:
    announce_running(home, "http://127.0.0.1:1/v1", "key")
    assert stat.S_IMODE(home.status.stat().st_mode) == 0o600
    lock = HomeLock(home)
    assert find_running(home) == RunningPeer(os.getpid(), "http://127.0.0.1:1/v1", "key")
    lock.release()
    assert find_running(home) is None
    forget_running(home)
    assert not home.status.exists()


def test_a_process_that_could_not_start_leaves_the_running_peer_s_word_alone(home: Home) -> None:
    said = {"pid": os.getpid() + 1, "api": "http://127.0.0.1:1/v1", "api_key": None}
    home.status.write_text(json.dumps(said))
    forget_running(home)
    assert json.loads(home.status.read_text()) == said


@pytest.mark.parametrize("text", ["", "[1, 2", "[]", "7", '{"pid": "x"}'])
def test_a_damaged_file_means_that_nobody_runs(home: Home, text: str) -> None:
    home.status.write_text(text)
    assert find_running(home) is None
    forget_running(home)


def test_a_file_that_cannot_be_written_is_a_clear_error(home: Home) -> None:
    home.status.mkdir()
    with pytest.raises(ConfigError, match=r"running\.json cannot be written"):
        announce_running(home, "http://127.0.0.1:1/v1", None)
    forget_running(home)

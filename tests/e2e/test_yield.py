"""A peer that was asked to yields to the programs of the machine's owner, and comes back when they have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshswarm.stage.owner_watch import LoadMeter

BUSY = "while True: pass"
DEADLINE_S = 75.0
"""For each change. Slowing down takes some 5 s, coming back 25 s after the last moment with much other work."""
RESTING = 0.1
"""The share of the processors that others may use on a machine that can come to rest."""


def standing(peer: Any) -> str:
    status = httpx.get(peer.api.removesuffix("/v1") + "/meshswarm/status", timeout=30).json()
    assert (status["owner"]["reason"] == "") is (status["owner"]["mode"] == "full")
    return str(status["owner"]["mode"])


def comes_to(peer: Any, modes: set[str]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while standing(peer) not in modes:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def every_processor_busy() -> Iterator[None]:
    """Programs of the owner's, with the usual priority."""
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def skip_unless_at_rest(meter: LoadMeter) -> None:
    share = meter.read().foreign_share
    if share > RESTING:
        pytest.skip(f"other programs used {share:.0%} of this machine: a peer that yields to them is never at ease")


def test_status_shows_how_a_peer_makes_room_and_comes_back(start_peer: Any, smollm2: Path) -> None:
    meter = LoadMeter()
    time.sleep(2.0)
    skip_unless_at_rest(meter)
    peer = start_peer("--model", str(smollm2), "--yield")
    assert comes_to(peer, {"full"})
    with every_processor_busy():
        assert comes_to(peer, {"throttled", "paused"}), peer.events
        question = {"model": None, "prompt": "Hello", "max_tokens": 2}
        answer = httpx.post(f"{peer.api}/completions", json=question, timeout=60)
        assert answer.status_code == 200, "the peer's own endpoint goes on"
    meter = LoadMeter()
    if not comes_to(peer, {"full"}):
        skip_unless_at_rest(meter)
        pytest.fail("the machine has been at rest, and the peer still yields")
    changes = [peer.wait_for("owner", timeout_s=5)["mode"]]
    while changes[-1] != "full":
        changes.append(peer.wait_for("owner", timeout_s=5)["mode"])
    assert changes[0] == "throttled" and changes[1:] in (["full"], ["paused", "full"], ["paused", "throttled", "full"])

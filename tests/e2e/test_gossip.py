"""Deaths and departures among real peers: routes go round them before anybody waits for them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.test_failures import ask, until_answered


def seen(peer: Any, other: Any) -> str:
    """What one peer thinks of another's life."""
    peers = httpx.get(f"{peer.api.removesuffix('/v1')}/meshswarm/peers").json()
    return next((str(each["liveness"]) for each in peers if each["peer_id"] == other.peer_id), "unknown")


def status(peer: Any) -> Any:
    return httpx.get(f"{peer.api.removesuffix('/v1')}/meshswarm/status").json()


def until_seen(peer: Any, other: Any, expected: str, within_s: float) -> float:
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        if seen(peer, other) == expected:
            return time.monotonic() - began
        time.sleep(0.05)
    pytest.fail(f"{other.peer_id[:8]} is {seen(peer, other)!r} and not {expected!r} after {within_s} s")


def test_a_killed_peer_is_gone_round_within_5_s_and_a_stopping_one_at_once(start_peer: Any, smollm2: Path) -> None:
    head = start_peer("--model", str(smollm2), "--layers", "0:15")
    two = [start_peer("--model", str(smollm2), "--layers", "15:30", "--join", head.address) for _ in range(2)]
    until_answered(head.api)
    for peer in two:
        until_seen(head, peer, "alive", 10.0)
    dead, left = sorted(two, key=lambda peer: -status(peer)["sessions_total"])
    assert status(dead)["sessions_total"] >= 1, "the request went through it"
    dead.kill()
    until_seen(head, dead, "gone", 5.0)
    began = time.monotonic()
    ask(head.api, max_tokens=1)
    assert time.monotonic() - began < 8.0, "the answer waited for a dead peer as long as a span may take to open"
    assert status(left)["sessions_total"] >= 1

    stream = ask(head.api, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    fresh = start_peer("--model", str(smollm2), "--layers", "15:30", "--join", head.address, home=dead.home.name)
    until_seen(head, fresh, "alive", 10.0)
    before = status(left)["sessions_total"]
    left.process.send_signal(signal.SIGINT)
    until_seen(head, left, "draining", 1.5)
    asked = status(fresh)["sessions_total"]
    ask(head.api, max_tokens=1, messages=[{"role": "user", "content": "Something else entirely."}])
    assert status(fresh)["sessions_total"] == asked + 1 and before >= 1
    stream.close()
    until_seen(head, left, "gone", 6.0)

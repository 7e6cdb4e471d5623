"""Peers that choose for themselves: one that comes to help, and goes where it is missed when another leaves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

FEW = ("--ctx", "511", "--sessions", "1")
ROOM_FOR_HALF = "276MB"
"""For the first 15 layers of SmolLM2 or the last, with one session of 511 positions; never for two such halves."""
PATIENCE_S = 30.0


def ask(api: str) -> httpx.Response:
    body = {
        "model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0, "max_tokens": 4,
    }  # fmt: skip
    return httpx.post(f"{api}/chat/completions", json=body, timeout=60)


def status(peer: Any) -> dict[str, Any]:
    return dict(httpx.get(peer.api.removesuffix("/v1") + "/meshswarm/status").json())


def test_a_peer_that_was_told_nothing_helps_and_fills_the_gap_when_another_leaves(
    start_peer: Any, smollm2: Path
) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:15", *FEW)
    last = start_peer("--model", str(smollm2), "--layers", "15:30", *FEW, "--join", first.address)
    # The slices of both are cut already.
    start_peer.prepared.give(start_peer.root / "third", start_peer.prepared.OF_HOLDERS)
    third = start_peer("--auto", "--memory", ROOM_FOR_HALF, *FEW, "--join", last.address, home="third")
    (placed,) = [event for event in third.events if event["event"] == "placed"]
    assert placed["unheld"] == 0
    assert third.ready["layers"] in ("0:15", "15:30"), "those of the slower peer"
    assert third.ready["layers"] in placed["message"] and "2 peers serve it" in placed["message"]
    assert third.ready["moves"] and not first.ready["moves"]

    leaving, staying = (last, first) if third.ready["layers"] == "0:15" else (first, last)
    answer = ask(staying.api)
    assert answer.status_code == 200, answer.text
    assert leaving.stop() == 0
    left_s = time.monotonic()
    while (again := ask(staying.api)).status_code != 200:
        assert again.status_code == 503 and float(again.headers["retry-after"]) > 0, again.text
        assert time.monotonic() - left_s < PATIENCE_S, third.events
        time.sleep(0.2)
    told = again.json()["choices"][0]["message"]
    assert told == answer.json()["choices"][0]["message"], "the same layers give the same answer"
    moved = third.wait_for("moved")
    assert moved["done"] and moved["layers"] == leaving.ready["layers"]
    (moving,) = [event["message"] for event in third.events if event["event"] == "moving"]
    assert moving.startswith(f"Nobody serves the layers {leaving.ready['layers']}: ")
    now = status(third)
    assert (now["layers"], now["next_layers"], now["role"]) == (leaving.ready["layers"], None, "server")
    assert third.stop() == staying.stop() == 0
    assert "Traceback" not in third.errors() + staying.errors()

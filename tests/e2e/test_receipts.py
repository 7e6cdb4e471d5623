"""Every session leaves receipts, signed by both sides, with the head and with every span of its route."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from meshswarm.ledger.receipt import Outcome, Receipt
from meshswarm.ledger.store import ReceiptStore

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 4}


def status(peer: Any) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(peer.api.removesuffix("/v1") + "/meshswarm/status").json()
    return found


def kept(peer: Any, limit: int) -> list[Receipt]:
    store = ReceiptStore(peer.home / "ledger.sqlite")
    try:
        return store.newest(limit)
    finally:
        store.close()


def test_a_head_that_leaves_settles_what_it_kept_with_every_span(start_peer: Any, smollm2: Path) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:10")
    second = start_peer("--model", str(smollm2), "--layers", "10:30", "--join", first.address)
    client = start_peer("--join", second.address)
    chat = list(QUESTION["messages"])
    for _ in range(2):
        body = {**QUESTION, "messages": chat}
        answered = httpx.post(client.api + "/chat/completions", json=body, timeout=60)
        assert answered.status_code == 200
        chat += [answered.json()["choices"][0]["message"], {"role": "user", "content": "Again."}]
    assert [status(peer)["sessions"] for peer in (first, second)] == [0, 0]
    assert [status(peer)["sessions_parked"] for peer in (first, second)] == [1, 1]
    assert status(client)["sessions_kept"] == 1
    assert client.stop() == 0
    for _ in range(100):
        if [status(peer)["receipts"] for peer in (first, second)] == [1, 1]:
            break
        time.sleep(0.05)
    assert [status(peer)["receipts"] for peer in (first, second)] == [1, 1]
    assert [status(peer)["sessions_parked"] for peer in (first, second)] == [0, 0]
    receipts = kept(client, 10)
    assert [receipt.outcome for receipt in receipts] == [Outcome.AGREED] * 2
    assert {str(receipt.claim.engagement.provider) for receipt in receipts} == {first.peer_id, second.peer_id}


def test_a_span_that_leaves_settles_what_is_parked_there_and_the_others_follow(start_peer: Any, smollm2: Path) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:15")
    second = start_peer("--model", str(smollm2), "--layers", "15:30", "--join", first.address)
    assert httpx.post(first.api + "/chat/completions", json=QUESTION, timeout=60).status_code == 200
    assert second.stop() == 0
    for _ in range(100):
        if status(first)["sessions_kept"] == 0 and status(first)["sessions_parked"] == 0:
            break
        time.sleep(0.05)
    assert status(first)["sessions_kept"] == 0
    assert [receipt.outcome for receipt in kept(second, 10)] == [Outcome.AGREED]
    assert [receipt.outcome for receipt in kept(first, 10)] == [Outcome.AGREED] * 2

"""Every answer leaves receipts, signed by both sides, with the head and with every span of its route."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from meshswarm.ledger.receipt import Outcome
from meshswarm.ledger.store import ReceiptStore

QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 4}


def receipts(peer: Any) -> int:
    return int(httpx.get(peer.api.removesuffix("/v1") + "/meshswarm/status").json()["receipts"])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_leaves_a_receipt_signed_by_both_sides_with_each_of_them(three_peers: Any, stream: bool) -> None:
    before = [receipts(peer) for peer in three_peers.all]
    answered = httpx.post(three_peers.client.api + "/chat/completions", json={**QUESTION, "stream": stream}, timeout=60)
    assert answered.status_code == 200
    due = [count + 1 for count in before[:3]] + [before[3] + 3]  # the client is the head of all three
    for _ in range(100):
        if [receipts(peer) for peer in three_peers.all] == due:
            break
        time.sleep(0.05)
    assert [receipts(peer) for peer in three_peers.all] == due
    store = ReceiptStore(three_peers.client.home / "ledger.sqlite")
    try:
        newest = store.newest(3)
    finally:
        store.close()
    assert [receipt.outcome for receipt in newest] == [Outcome.AGREED] * 3
    assert {str(receipt.claim.engagement.provider) for receipt in newest} == {
        peer.peer_id for peer in three_peers.spans
    }

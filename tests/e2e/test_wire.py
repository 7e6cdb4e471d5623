"""Rows between peers go narrower where that was proved for the model, and as they are where it was not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.store import Store
from meshswarm.ledger.store import ReceiptStore
from meshswarm.stage.families.proofs import installed_build
from meshswarm.stage.messages import Dtype
from meshswarm.stage.wire_proofs import Divergence, DtypeResult, WireProof, WireProofs

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 4}


def bytes_in(peer: Any, n_sessions: int) -> int:
    """What came in to the last of the peer's sessions, when so many are over."""
    for _ in range(100):
        store = ReceiptStore(peer.home / "ledger.sqlite")
        receipts = store.newest(10)
        store.close()
        if len(receipts) == n_sessions:
            return int(receipts[0].claim.counters.bytes_in)
        time.sleep(0.05)
    raise AssertionError("no receipt came")


def prove_f16(home: Path, smollm2: Path, spans: tuple[str, ...] = ("0:15", "15:30")) -> None:
    """What `models verify` found for this model in these spans, as it writes it down."""
    model_id = Store(home).import_file(smollm2).model_id
    found = DtypeResult(Dtype.F16, Divergence(0.97, 0.0034, 0.018), None)
    noise = Divergence(0.965, 0.0043, 0.03)
    proof = WireProof(model_id_text(model_id), installed_build(), "cpu-1", spans, 825, 27_336.0, noise, (found,))
    WireProofs(home / "proofs").note(model_id, proof)


def notices(peer: Any) -> list[str]:
    return [event["message"] for event in peer.events if event["event"] == "notice"]


def test_rows_are_half_as_long_in_f16_where_it_is_proved_and_only_there(start_peer: Any, smollm2: Path) -> None:
    last = start_peer("--model", str(smollm2), "--layers", "15:30")
    wanting_f16 = ("--model", str(smollm2), "--layers", "0:15", "--wire", "f16", "--join", last.address)
    sizes = {}
    for name in ("unproved", "proved"):
        if name == "proved":
            prove_f16(start_peer.root / name, smollm2)
        first = start_peer(*wanting_f16, home=name)
        assert ["go over the wire in f32: f16 is not proved" in said for said in notices(first)] == (
            [True] if name == "unproved" else []
        )
        assert httpx.post(first.api + "/chat/completions", json=QUESTION, timeout=60).status_code == 200
        assert first.stop() == 0
        sizes[name] = bytes_in(last, len(sizes) + 1)
    assert sizes["unproved"] == 2 * sizes["proved"] > 0


def test_a_wish_that_the_route_cannot_grant_is_said_once_also_without_layers(start_peer: Any, smollm2: Path) -> None:
    last = start_peer("--model", str(smollm2), "--layers", "15:30")
    home = "proved-for-no-hop"
    prove_f16(start_peer.root / home, smollm2, ("0:30",))
    first = start_peer("--model", str(smollm2), "--layers", "0:15", "--wire", "f16", "--join", last.address, home=home)
    client = start_peer("--wire", "f16", "--join", last.address)
    for peer, words in (
        (client, "in f32: f16 is not proved for it on this machine"),
        (first, "in f32 on a route through 2 peers: f16 is proved for at most 1"),
    ):
        assert notices(peer) == []
        talk = list(QUESTION["messages"])
        for is_next_turn in (False, True):
            answer = httpx.post(peer.api + "/chat/completions", json={**QUESTION, "messages": talk}, timeout=60).json()
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is is_next_turn
            talk += [answer["choices"][0]["message"], {"role": "user", "content": "Once more."}]
        assert peer.stop() == 0
        peer.wait_for("stopped")
        assert len(notices(peer)) == 1 and words in notices(peer)[0]

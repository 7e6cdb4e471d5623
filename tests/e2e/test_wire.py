"""Rows between peers go narrower where that was proved for the model, and as they are where it was not."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshswarm.artifacts.store.store import Store
from meshswarm.config import Home
from meshswarm.ledger.store import ReceiptStore
from meshswarm.stage.families.proofs import CutProof, note
from meshswarm.stage.proving.wire_proofs import WireProofs

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


@pytest.fixture
def proofs(smollm2_verified: Any) -> Path:
    """What `models prove` writes: f16 is proved, over one hop."""
    assert smollm2_verified.result["proved"] == ["f32", "f16"]
    return Home(smollm2_verified.home).proofs


def notices(peer: Any) -> list[str]:
    return [event["message"] for event in peer.events if event["event"] == "notice"]


def test_rows_are_half_as_long_in_f16_where_it_is_proved_and_only_there(
    start_peer: Any, smollm2: Path, proofs: Path
) -> None:
    last = start_peer("--model", str(smollm2), "--layers", "15:30")
    wanting_f16 = ("--model", str(smollm2), "--layers", "0:15", "--wire", "f16", "--join", last.address)
    sizes = {}
    for name in ("unproved", "proved"):
        if name == "proved":
            shutil.copytree(proofs, start_peer.root / name / "proofs")
        first = start_peer(*wanting_f16, home=name)
        assert ["go over the wire in f32: f16 is not proved" in said for said in notices(first)] == (
            [True] if name == "unproved" else []
        )
        answer = httpx.post(first.api + "/chat/completions", json=QUESTION, timeout=60).json()
        granted = "f32" if name == "unproved" else "f16"
        assert answer["meshswarm"]["wire"] == granted
        assert first.ready["wire"] == {"asked": "f16", "granted": granted}
        assert first.stop() == 0
        sizes[name] = bytes_in(last, len(sizes) + 1)
    assert sizes["unproved"] == 2 * sizes["proved"] > 0


def test_a_wish_that_the_route_cannot_grant_is_said_once_also_without_layers(
    start_peer: Any, smollm2: Path, proofs: Path
) -> None:
    last = start_peer("--model", str(smollm2), "--layers", "15:30")
    home = "proved-for-no-hop"
    shutil.copytree(proofs, start_peer.root / home / "proofs")
    known = WireProofs(start_peer.root / home / "proofs")
    model_id = Store(start_peer.root / home).import_file(smollm2).model_id
    proof = known.of(model_id)
    assert proof is not None
    known.note(model_id, replace(proof, spans=("0:30",)))
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


def test_a_model_whose_parts_were_found_to_differ_is_served_whole_and_says_so(start_peer: Any, smollm2: Path) -> None:
    home = start_peer.root / "refuted"
    model_id = Store(Home(home).create().root).import_file(smollm2).model_id
    note(home / "proofs", model_id, CutProof("cpu-1", refusal="at position 7 a logit differs by 0.5"))
    peer = start_peer("--model", str(smollm2), home="refuted")
    assert peer.ready["layers"] == "0:30"
    assert ["is served whole (layers 0:30) on this machine" in said for said in notices(peer)] == [True]

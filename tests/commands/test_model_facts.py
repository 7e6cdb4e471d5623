"""What `models show` and `models verify` say, about a real model and about large ones that need others."""

from pathlib import Path

import pytest
from tests.stage.tiny_models import write_tiny

from meshswarm.commands import model_facts
from meshswarm.commands.model_facts import MemoryQuestion, describe, verify_model
from meshswarm.commands.show import show_facts, show_proof
from meshswarm.config import Home, WireChoice
from meshswarm.stage import verify
from meshswarm.stage.llama_options import parse_llama_options
from meshswarm.stage.messages import Dtype
from meshswarm.stage.proof_texts import PROOF_TEXTS
from meshswarm.stage.wire_proofs import WireProofs


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def facts_of(home: Home, path: Path, **question) -> dict:
    asked = {"n_ctx": 4095, "n_sessions": 4} | question
    return describe(home, str(path), MemoryQuestion(**asked), None)


def test_the_default_models_facts(home, smollm2, capsys):
    facts = facts_of(home, smollm2)
    assert facts["layers"] == len(facts["layer_bytes"]) == len(facts["kv"]["token_bytes_by_layer"]) == 30
    assert facts["cuts"]["starts"] == list(range(30))
    assert sum(facts["layer_bytes"]) + facts["outer_bytes"] == facts["whole"]["weights"] < facts["bytes"]
    assert facts["kv"]["token_bytes"] == 30 * 2 * 192 * 2
    assert facts["row_bytes"] == {"f32": 2304, "f16": 1152, "q8": 648}
    assert facts["wire"] == {"proved": ["f32"], "proof": None}
    assert facts["plan"] is None
    show_facts(facts)
    said = capsys.readouterr().out
    for words in ("30 of 2.2 MB", "can be cut between any two", "23,040 bytes a position", "674.4 MB for 4 sessions"):
        assert words in said


def test_a_plan_for_given_peers(home, smollm2, capsys):
    facts = facts_of(home, smollm2, n_sessions=1, rooms=(300_000_000, 350_000_000))
    spans = facts["plan"]["spans"]
    assert [span["peer"] for span in spans] == [1, 0]
    assert all(span["total"] <= span["room"] for span in spans)
    show_facts(facts)
    assert spans[0]["layers"] in capsys.readouterr().out


def test_why_there_is_no_plan(home, smollm2, capsys):
    show_facts(facts_of(home, smollm2, rooms=(200_000_000, 210_000_000)))
    assert "its layers 0:1 alone, which cannot be cut further, take" in capsys.readouterr().out


def test_options_of_llama_cpp_count(home, smollm2):
    small = facts_of(home, smollm2, options=parse_llama_options(["type_k=q8_0", "type_v=q8_0"]))
    assert small["kv"]["token_bytes"] == 30 * 2 * 192 // 32 * 34


def test_a_context_longer_than_the_models_is_cut(home, smollm2):
    assert facts_of(home, smollm2, n_ctx=1 << 20)["load"]["n_ctx"] == 8192


def test_running_state_is_shown(home, tmp_path, capsys):
    show_facts(facts_of(home, write_tiny("qwen35", tmp_path / "tiny.gguf")))
    assert "bytes a session" in capsys.readouterr().out


def test_what_is_proved_is_written_down_and_shown(home, smollm2, monkeypatch, capsys):
    monkeypatch.setattr(model_facts, "PROOF_TEXTS", PROOF_TEXTS[:1])
    monkeypatch.setattr(verify, "MAX_SPANS", 2)
    monkeypatch.setattr(verify, "N_ANSWER", 2)
    said: list[str] = []
    verified = verify_model(home, str(smollm2), 1, None, said.append)
    assert "cutting it into 0:15, 15:30" in said
    assert verified["proof"]["spans"] == ("0:15", "15:30")
    show_proof(verified)
    assert "compute bit for bit what the whole does" in capsys.readouterr().out
    facts = facts_of(home, smollm2)
    assert facts["wire"]["proved"] == verified["proved"]
    (model,) = model_facts.Store(home.root).models()
    wire = WireProofs(home.proofs).choose(WireChoice.F16, model.model_id)
    assert (wire.dtype is Dtype.F16) == ("f16" in verified["proved"])
    assert not list(home.root.glob("verify-*"))

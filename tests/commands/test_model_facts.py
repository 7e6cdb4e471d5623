"""What `models show` and `models prove` say, about a real model and about large ones that need others."""

import shutil
from pathlib import Path

import pytest
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.store.store import Store
from meshswarm.commands import model_facts
from meshswarm.commands.model_facts import MemoryQuestion, describe, prove_model
from meshswarm.commands.show import show_proof
from meshswarm.commands.show_models import show_facts
from meshswarm.config import Home, WireChoice
from meshswarm.span import Span
from meshswarm.stage.engine.llama_options import parse_llama_options
from meshswarm.stage.families import proofs
from meshswarm.stage.families.cuts import IllegalCutError
from meshswarm.stage.proving import verify, wire_proofs
from meshswarm.stage.proving.texts import PROOF_TEXTS
from meshswarm.stage.proving.verify import SplitDiffersError
from meshswarm.stage.proving.wire_proofs import WireProofs
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.slices.store import Slices


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
    assert facts["wire"] == {"proved": ["f32"], "is_current": False, "proof": None}
    assert facts["plan"] is None
    show_facts(facts)
    said = capsys.readouterr().out
    for words in (
        "30 of 2.2 MB",
        "can be cut between any two",
        "23,040 bytes a position",
        "694.3 MB at most for all of it and 4 sessions",
    ):
        assert words in said


def test_a_file_that_is_only_looked_at_changes_nothing(home, smollm2):
    assert facts_of(home, smollm2)["disk"] == {
        "files": [str(smollm2)],
        "gone_files": [],
        "held_bytes": smollm2.stat().st_size,
        "pieces": 0,
        "slices": [],
    }
    assert Store(home.root).models() == [] and [path for path in home.root.rglob("*") if path.is_file()] == []


def test_a_plan_for_given_peers(home, smollm2, capsys):
    facts = facts_of(home, smollm2, n_sessions=1, rooms=(330_000_000, 380_000_000))
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


@pytest.fixture
def short(monkeypatch):
    """Proofs on a quarter of the texts, in two parts."""
    monkeypatch.setattr(model_facts, "PROOF_TEXTS", PROOF_TEXTS[2:4])
    monkeypatch.setattr(verify, "MAX_SPANS", 2)
    monkeypatch.setattr(verify, "probe", lambda _: None)


def build_of(monkeypatch, build: str) -> None:
    """Say that this build of llama.cpp is installed."""
    for module in (proofs, wire_proofs, model_facts):
        monkeypatch.setattr(module, "installed_build", lambda: build)


def test_what_is_proved_is_written_down_and_shown(home, smollm2, smollm2_verified, monkeypatch, capsys):
    shutil.copytree(smollm2_verified.home, home.root)
    verified = smollm2_verified.result
    assert "cutting it into 0:15, 15:30" in smollm2_verified.said
    assert verified["proof"]["spans"] == ("0:15", "15:30")
    assert verified["proved"] == ["f32", "f16"]
    show_proof(verified)
    assert "compute bit for bit what the whole does" in capsys.readouterr().out
    facts = facts_of(home, smollm2)
    assert facts["wire"]["proved"] == ["f32", "f16"]
    show_facts(facts)
    assert "f16 (1152 bytes a row)" in capsys.readouterr().out
    (model,) = Store(home.root).models()
    assert WireProofs(home.proofs).choose(WireChoice.F16, model.model_id).dtype is Dtype.F16
    assert not list(home.root.glob("verify-*"))
    build_of(monkeypatch, "9.9.9")
    show_facts(facts_of(home, smollm2))
    assert "f32 (2304 bytes a row); what was proved with llama-cpp-python 0.3.36 has to be proved again" in (
        capsys.readouterr().out
    )


def test_on_a_new_build_the_verified_model_alone_can_be_cut(home, tmp_path, short, monkeypatch, capsys):
    build_of(monkeypatch, "9.9.9")
    paths = [write_tiny("qwen3", tmp_path / f"{n_layers}.gguf", n_layers=n_layers) for n_layers in (4, 5)]
    store, slices = Store(home.create().root), Slices(Store(home.root), home.root)
    verified, other = (store.obtain(str(path)).model_id for path in paths)
    for model_id in (verified, other):
        with pytest.raises(IllegalCutError, match="`meshswarm models prove` can prove those of this model here"):
            slices.file(model_id, Span(1, 3))
    show_proof(prove_model(home, str(paths[0]), 1, None, lambda _: None))
    assert "It can be cut between any two of its 4 layers." in capsys.readouterr().out
    assert slices.file(verified, Span(1, 3)).path.is_file()
    assert facts_of(home, paths[0])["cuts"]["starts"] == [0, 1, 2, 3]
    with pytest.raises(IllegalCutError, match=r"and this is 9\.9\.9"):
        slices.file(other, Span(1, 3))
    build_of(monkeypatch, "9.9.10")
    with pytest.raises(IllegalCutError, match=r"and this is 9\.9\.10"):
        slices.file(verified, Span(1, 3))


def test_parts_that_differ_are_not_forgotten(home, tmp_path, short, monkeypatch):
    path = write_tiny("qwen3", tmp_path / "tiny.gguf")
    other = write_tiny("qwen3", tmp_path / "other.gguf", embedding_std=2.0)
    model_id = Store(home.create().root).obtain(str(path)).model_id
    slices = Slices(Store(home.root), home.root)
    assert slices.file(model_id, Span(0, 2)).path.is_file()
    write_slice = verify.write_slice
    with monkeypatch.context() as patch:
        patch.setattr(verify, "write_slice", lambda _, *rest, **named: write_slice(other, *rest, **named))
        with pytest.raises(SplitDiffersError, match="it is served whole here from now on"):
            prove_model(home, str(path), 1, None, lambda _: None)
    assert "found with llama-cpp-python 0.3.36 that the parts 0:2, 2:4" in facts_of(home, path)["cuts"]["sentence"]
    with pytest.raises(IllegalCutError, match=r"this model is served whole .* on this machine"):
        slices.file(model_id, Span(0, 2))
    assert slices.file(model_id, Span(0, 4)).path == path
    prove_model(home, str(path), 1, None, lambda _: None)
    assert slices.file(model_id, Span(0, 2)).path.is_file(), "a later proof takes its place"

"""Which dtypes a head may ask for: what is written down for this artifact, build and number of hops, nothing else."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshswarm.artifacts.merkle import model_id_text
from meshswarm.config import WireChoice
from meshswarm.stage.families.proofs import installed_build
from meshswarm.stage.proving.wire_proofs import F32_WIRE, Divergence, DtypeResult, Wire, WireProof, WireProofs
from meshswarm.stage.sessions.messages import Dtype

MODEL = bytes(range(32))
NOISE = Divergence(0.97, 0.004, 0.03)
PROOF = WireProof(
    model_id=model_id_text(MODEL),
    build=installed_build(),
    numclass="cpu-1",
    spans=("0:10", "10:20", "20:30"),
    n_rows=800,
    largest=27_000.0,
    noise=NOISE,
    results=(
        DtypeResult(Dtype.F16, Divergence(0.97, 0.003, 0.02), None),
        DtypeResult(Dtype.Q8, None, "it broke"),
    ),
)


@pytest.fixture
def proofs(tmp_path) -> WireProofs:
    return WireProofs(tmp_path / "proofs")


def test_what_was_written_is_read_again(proofs):
    proofs.note(MODEL, PROOF)
    assert proofs.of(MODEL) == PROOF
    assert PROOF.proved() == (Dtype.F32, Dtype.F16)


def test_without_a_proof_rows_are_sent_as_they_are(proofs):
    assert proofs.of(MODEL) is None
    assert [proofs.choose(choice, MODEL) for choice in WireChoice] == [F32_WIRE] * 4


def test_a_head_gets_the_dtype_it_prefers_where_it_is_proved(proofs):
    proofs.note(MODEL, PROOF)
    chosen = {choice: proofs.choose(choice, MODEL) for choice in WireChoice}
    assert chosen == {
        WireChoice.F32: F32_WIRE,
        WireChoice.F16: Wire(Dtype.F16, 2),
        WireChoice.Q8: F32_WIRE,
        WireChoice.AUTO: Wire(Dtype.F16, 2),
    }


def test_auto_takes_the_narrowest(proofs):
    results = tuple(dataclasses.replace(result, obstacle=None) for result in PROOF.results)
    proofs.note(MODEL, dataclasses.replace(PROOF, results=results))
    assert proofs.choose(WireChoice.AUTO, MODEL) == Wire(Dtype.Q8, 2)


def test_more_hops_than_were_proved_are_not_covered(proofs):
    proofs.note(MODEL, PROOF)
    wire = proofs.choose(WireChoice.F16, MODEL)
    assert [wire.over(hops) for hops in (0, 2, 3)] == [Dtype.F16, Dtype.F16, Dtype.F32]


def test_a_proof_of_another_build_proves_nothing_here(proofs):
    proofs.note(MODEL, dataclasses.replace(PROOF, build="0.0.1"))
    assert proofs.of(MODEL) is not None
    assert proofs.choose(WireChoice.AUTO, MODEL) == F32_WIRE


def test_a_proof_under_another_models_name_proves_nothing(proofs):
    proofs.note(MODEL, dataclasses.replace(PROOF, model_id=model_id_text(bytes(32))))
    assert proofs.of(MODEL) is None


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(key=st.sampled_from([*PROOF.as_json(), "other"]), value=junk)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_cannot_be_read_proves_nothing(key, value, tmp_path):
    proofs = WireProofs(tmp_path)
    (tmp_path / f"{model_id_text(MODEL)}.json").write_text(json.dumps(PROOF.as_json() | {key: value}))
    wire = proofs.choose(WireChoice.AUTO, MODEL)
    assert wire.over(wire.max_hops + 1) is Dtype.F32
    if key in ("format", "model_id", "build", "other"):
        assert wire == (Wire(Dtype.F16, 2) if key == "other" else F32_WIRE)

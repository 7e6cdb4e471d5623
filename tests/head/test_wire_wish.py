"""A wish for narrower rows is granted where it is proved, and said once where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.config import WireChoice
from meshswarm.head.wire_wish import WireWish
from meshswarm.stage.families.proofs import installed_build
from meshswarm.stage.proving.wire_proofs import F32_WIRE, Divergence, DtypeResult, Wire, WireProof, WireProofs
from meshswarm.stage.sessions.messages import Dtype

NOISE = Divergence(0.97, 0.003, 0.02)


def model(name: str) -> ModelInfo:
    return ModelInfo(name.encode().ljust(32, b"."), name, "llama", "q4", 4, 64, 32, 128, (1000,), 100, True)


@pytest.fixture
def proofs(tmp_path: Path) -> WireProofs:
    """F16 is proved for the model "proved", over two hops."""
    made, proved = WireProofs(tmp_path), model("proved").model_id
    results = (DtypeResult(Dtype.F16, NOISE, None), DtypeResult(Dtype.Q8, NOISE, "too coarse"))
    spans = ("0:1", "1:2", "2:4")
    made.note(proved, WireProof(model_id_text(proved), installed_build(), "cpu-1", spans, 100, 1.0, NOISE, results))
    return made


async def test_what_is_proved_is_asked_for_and_goes_without_saying(proofs: WireProofs) -> None:
    said: list[str] = []
    for choice in (WireChoice.F16, WireChoice.AUTO):
        wish = WireWish(choice, proofs, said.append)
        wire = await wish.of(model("proved"))
        assert wire == Wire(Dtype.F16, 2)
        wish.met(model("proved"), wire, 2)
        assert await wish.facts(model("proved")) == {"asked": str(choice), "granted": "f16"}
        assert await wish.facts(model("other")) == {"asked": str(choice), "granted": "f32"}
        assert await wish.facts(None) == {"asked": str(choice), "granted": None}
    assert said == []


@pytest.mark.parametrize(
    ("choice", "name", "words"),
    [
        (WireChoice.F16, "other", "rows of other go over the wire in f32: f16 is not proved for it"),
        (WireChoice.AUTO, "other", "rows of other go over the wire in f32: anything narrower is not proved for it"),
        (WireChoice.Q8, "proved", "rows of proved go over the wire in f32: q8 was tried by"),
    ],
)
async def test_what_is_not_proved_is_said_once_for_each_model(
    proofs: WireProofs, choice: WireChoice, name: str, words: str
) -> None:
    said: list[str] = []
    wish = WireWish(choice, proofs, said.append)
    for _ in range(3):
        assert await wish.of(model(name)) == F32_WIRE
        wish.met(model(name), F32_WIRE, 5)
    assert len(said) == 1 and said[0].startswith(words)
    await wish.of(model("a third one"))
    assert len(said) == 2


async def test_a_route_with_more_hops_than_were_proved_is_said_once(proofs: WireProofs) -> None:
    said: list[str] = []
    wish = WireWish(WireChoice.F16, proofs, said.append)
    for n_hops in (1, 3, 4, 2, 3):
        wish.met(model("proved"), await wish.of(model("proved")), n_hops)
    assert said == ["rows of proved go over the wire in f32 on a route through 4 peers: f16 is proved for at most 3"]


async def test_who_wished_for_nothing_hears_nothing(proofs: WireProofs) -> None:
    wish = WireWish(WireChoice.F32, proofs, lambda sentence: pytest.fail(sentence))
    assert await wish.of(model("other")) == await wish.of(model("proved")) == F32_WIRE
    wish.met(model("proved"), F32_WIRE, 5)

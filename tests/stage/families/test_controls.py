"""Rows with one thing wrong in them: the comparison sees it, or llama.cpp refuses the slice. Else it proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.stage.chain import Session
from tests.stage.family_parity import Proof, Row, differences
from tests.stage.tiny_models import TINY

from meshswarm.stage.engine import engine
from meshswarm.stage.engine.engine import EngineError
from meshswarm.stage.engine.llama import LlamaError
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families import cuts
from meshswarm.stage.families.family import Pattern, Rollback
from meshswarm.stage.families.table import FAMILIES

Wrong = Mapping[str, Callable[[Any], Any]]
HALF_HEADS = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}


@dataclass(frozen=True)
class Control:
    """A tiny model, what is wrong in its row (the new value of a field from the old), and a cut that the fault spoils.

    `is_loaded`: llama.cpp takes the slices, so that only the numbers tell.
    """

    name: str
    what: str
    wrong: Wrong
    at: int
    is_loaded: bool = True
    changes: Mapping[str, Any] | None = None


def _left_as_it_is(group: str, key: str) -> Wrong:
    """`key`, which belongs to `group`, is copied into every span as it stands."""
    return {group: lambda keys: keys - {key}, "common_keys": lambda keys: keys | {key}}


def _forgotten(_: object) -> tuple[()]:
    return ()


def _of_period_3(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    return tuple(replace(pattern, period_key=None, default_period=3) for pattern in patterns)


CONTROLS = [
    *(
        Control(name, "windows start anew in each span", {"patterns": _forgotten, "needed_kinds": _forgotten}, at)
        for name, at in (("gemma2", 1), ("gemma3", 2), ("gpt-oss", 1), ("cohere2", 2), ("olmo3", 2))
    ),
    *(
        Control(name, "received rows are scaled as embeddings are", {"inject_node": lambda _: "embd"}, 2)
        for name in ("gemma2", "gemma3")
    ),
    *(
        Control(
            name,
            "dense layers are counted in each span",
            _left_as_it_is("count_keys", "leading_dense_block_count"),
            2,
            is_loaded=False,
        )
        for name in ("glm4moe", "glm-dsa", "deepseek2", "deepseek32", "lfm2moe")
    ),
    Control(
        "deepseek4",
        "hash layers are counted in each span",
        _left_as_it_is("count_keys", "hash_layer_count"),
        4,
        is_loaded=False,
    ),
    Control("smollm3", "cut within its period", {"start_multiple": lambda _: 1}, 6),
    Control(
        "qwen35",
        "attention layers in another period",
        {"patterns": _of_period_3, "common_keys": lambda keys: keys | {"full_attention_interval"}},
        2,
        is_loaded=False,
    ),
    Control("nemotron_h", "read before the residual is added", {"capture_node": lambda _: "l_out-{layer}"}, 2),
    *(
        Control(
            name,
            "the number of layers is the span's own",
            {"matched_counts": lambda _: frozenset()},
            n_layers // 2,
            changes={"n_layers": n_layers, "keys": HALF_HEADS},
        )
        for name, n_layers in (("gemma2", 46), ("gemma3", 62))
    ),
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: f"{control.name}, {control.what}")
async def test_a_wrong_row_is_noticed(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Proof(Row(control.name, control.changes or {}), tmp_path / "family")
    steps = proof.conversation(Profile.FAST, n_steps=0).steps[:1]
    right = FAMILIES[TINY[control.name].architecture]
    wrong = replace(right, **{name: change(getattr(right, name)) for name, change in control.wrong.items()})
    for module in (cuts, engine):
        monkeypatch.setattr(module, "FAMILIES", dict(FAMILIES) | {wrong.architecture: wrong})
    try:
        hops = proof.hops(proof.spans(control.at))
    except LlamaError:
        assert not control.is_loaded
    else:
        assert control.is_loaded
        with Session(hops, Profile.FAST) as session:
            assert await differences(session, steps)
    await proof.close()


@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "lfm2", "nemotron_h", "granitehybrid", "deepseek4"])
async def test_a_running_state_does_not_go_back_by_dropping_positions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = Proof(Row(name), tmp_path / "family")
    steps = proof.conversation(Profile.FAST).steps
    wrong = replace(FAMILIES[name], rollback=Rollback.KV)
    monkeypatch.setattr(engine, "FAMILIES", dict(FAMILIES) | {name: wrong})
    with Session(proof.hops(proof.spans(3)), Profile.FAST) as session:
        assert not await differences(session, steps[:3])
        with pytest.raises(EngineError, match="this model cannot go back"):
            await session.rows([5], [0], truncate_to=session.n_held - 2)
    await proof.close()


async def test_tokens_that_are_not_the_rows_own_are_noticed(tmp_path: Path) -> None:
    proof = Proof(Row("deepseek4", {"keys": {"hash_layer_count": 5}}), tmp_path / "family")
    steps = proof.conversation(Profile.FAST, n_steps=0).steps[:1]
    with Session(proof.hops(proof.spans(4)), Profile.FAST) as session:
        assert not await differences(session, steps)
    with Session(proof.hops(proof.spans(4)), Profile.FAST, tokens_beside=[0] * 200) as session:
        assert await differences(session, steps)
    await proof.close()

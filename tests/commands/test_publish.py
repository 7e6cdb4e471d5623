"""Publishing models that are here and models that are elsewhere; whose a name is, and how a person changes that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.gguf.split_writing import split_model
from tests.artifacts.sources.conftest import cdn, hub  # noqa: F401
from tests.artifacts.sources.web_server import HubServer
from typer.testing import CliRunner

from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests, SourceChangedError
from meshswarm.artifacts.merkle import model_id_text, parse_model_id
from meshswarm.artifacts.store.finding import AmbiguousModelError
from meshswarm.artifacts.store.store import Store
from meshswarm.cli import app
from meshswarm.commands.model_facts import MemoryQuestion, describe
from meshswarm.commands.publish import Wish, manifest_facts, publish, show_published, show_trust, trust
from meshswarm.commands.show_models import show_facts
from meshswarm.config import Home
from meshswarm.errors import ConfigError, UnknownModelError
from meshswarm.identity import Identity
from meshswarm.stage.engine.engine import SpanEngine, Speed
from meshswarm.stage.proving import calibration

OTHER = Identity.from_seed(b"2" * 32)
QUIET = Wish(is_calibrated=False)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def tiny_file(gguf_recipe: Any, tmp_path: Path) -> Path:
    recipe = gguf_recipe(n_layers=4)
    recipe.entries["general.license"] = (8, "apache-2.0")
    path: Path = recipe.write(tmp_path / "tiny.gguf", seed=5)
    return path


def published(home: Home, ref: str, wish: Wish = QUIET) -> dict[str, Any]:
    return publish(home, ref, wish, None, lambda _sentence: None)


def test_a_model_that_is_here_is_published_with_what_its_file_says(home: Home, tiny_file: Path) -> None:
    facts = published(home, str(tiny_file))
    store, manifests = Store(home.root), Manifests(home.root)
    (info,) = store.models()
    signed = manifests.by_name("tiny")
    assert signed is not None and signed.publisher == Identity.load_or_create(home.key).peer_id
    assert signed.manifest.contents == store.files(info.model_id) and signed.manifest.licence == "apache-2.0"
    signed.manifest.check_header(store.header(info.model_id))
    assert signed.manifest.sources == (), "a path of this machine is nobody else's business"
    assert (facts["name"], facts["publisher"], facts["is_pinned"]) == ("tiny", str(signed.publisher), True)
    assert facts["cuts"][0]["starts"] == [0, 1, 2, 3] and facts["wire"] == []
    assert {**(manifest_facts(home, info.model_id) or {}), "reach": None} == facts
    assert manifest_facts(home, bytes(32)) is None


def test_what_a_person_says_goes_before_and_a_later_edition_keeps_what_was_said(home: Home, tiny_file: Path) -> None:
    source = "https://models.example.org/tiny.gguf"
    first = published(home, str(tiny_file), replace(QUIET, name="my-model", licence="mit", sources=(source,)))
    assert (first["name"], first["licence"], first["sources"]) == ("my-model", "mit", [source])
    later = published(home, first["model_id"], replace(QUIET, name="my-model", sources=("pypi:mine",)))
    assert later["number"] > first["number"] and later["sources"] == ["pypi:mine", source]
    signed = Manifests(home.root).by_name("my-model")
    assert signed is not None and signed.manifest.number == later["number"]


def test_it_is_calibrated_by_its_own_layers_and_the_next_edition_keeps_that(
    home: Home, tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "probe", lambda _path: None)
    monkeypatch.setattr(SpanEngine, "measure", lambda _engine, _budget_s: Speed(0, 0, 0, 0))
    said: list[str] = []
    facts = publish(home, str(tiny_file), Wish(n_threads=1), None, said.append)
    assert {row["depth"] for row in facts["calibrations"]} == {1, 2}, said
    assert any(sentence.startswith("Calibrating: computing") for sentence in said)
    assert published(home, "tiny")["calibrations"] == facts["calibrations"]


def test_a_name_that_is_another_s_is_not_taken_from_him(home: Home, tiny_file: Path) -> None:
    Manifests(home.root).trust("tiny", OTHER.peer_id)
    with pytest.raises(ManifestChangedError, match=f"it belongs to {OTHER.peer_id}"):
        published(home, str(tiny_file))
    assert published(home, str(tiny_file), replace(QUIET, name="tiny-mine"))["name"] == "tiny-mine"


@pytest.mark.parametrize(
    ("wish", "complaint"),
    [
        (replace(QUIET, name="No Name"), "not a model's name"),
        (replace(QUIET, name="../x"), "not a model's name"),
        (replace(QUIET, licence="\x1b[2J"), "a licence is"),
        (replace(QUIET, sources=("https://user:pw@example.org/x.gguf",)), "no source that others can use"),
        (replace(QUIET, sources=("/home/me/x.gguf",)), "no source that others can use"),
    ],
)
def test_wishes_that_cannot_be_are_said_before_anything_is_read(home: Home, wish: Wish, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        published(home, "/nowhere/at-all.gguf", wish)


def test_a_model_is_found_by_the_name_it_was_published_under_and_by_that_among_namesakes(
    home: Home, tiny_file: Path, gguf_recipe: Any, tmp_path: Path
) -> None:
    own = published(home, str(tiny_file), replace(QUIET, name="my-model"))
    store = Store(home.root)
    found = store.find("my-model")
    assert found is not None and found.id_text == own["model_id"]
    (tmp_path / "other").mkdir()
    namesake = store.import_file(gguf_recipe(n_layers=5).write(tmp_path / "other" / "tiny.gguf", seed=6))
    with pytest.raises(AmbiguousModelError):
        store.find("tiny")
    published(home, namesake.id_text, replace(QUIET, name="tiny"))
    assert store.find("tiny") == namesake


def test_what_is_nowhere_cannot_be_published(home: Home) -> None:
    with pytest.raises(UnknownModelError, match="no model 'unheard' is known here"):
        published(home, "unheard")


def test_a_file_on_the_hub_is_read_once_and_not_kept(home: Home, hub: HubServer, tiny_file: Path) -> None:  # noqa: F811
    data = tiny_file.read_bytes()
    repo = hub.put_repo("owner/repo", {"tiny-Q8_0.gguf": data})
    ref = "hf:owner/repo/tiny-Q8_0.gguf"
    facts = published(home, ref)
    store, own_id = Store(home.root), parse_model_id(facts["model_id"])
    assert (facts["name"], facts["bytes"]) == ("tiny", len(data))
    assert facts["sources"] == [f"{ref}@{repo.commit}"], "of the commit that was read"
    assert Manifests(home.root).source(ref) == own_id
    assert store.models() == [] and store.piece_layer(own_id, 0) is not None
    store.header_proof(own_id)
    assert sum(path.stat().st_size for path in home.root.rglob("*") if path.is_file()) < len(data)
    elsewhere = Store(home.root / "elsewhere")
    assert elsewhere.import_file(tiny_file).model_id == own_id, "the same model as its file"


def test_a_model_of_several_files_is_one_wherever_it_is_published_from(
    home: Home,
    hub: HubServer,  # noqa: F811
    tiny_file: Path,
    tmp_path: Path,
) -> None:
    parts = split_model(tiny_file, tmp_path / "parts", 3)
    hub.put_repo("owner/repo", {path.name: path.read_bytes() for path in parts})
    streamed = published(home, f"hf:owner/repo/{parts[1].name}")
    assert streamed["files"] == 3 and streamed["sources"][0].partition("@")[0].endswith(parts[0].name)
    elsewhere = Home(tmp_path / "elsewhere")
    here = published(elsewhere, str(parts[2]))
    assert here["model_id"] == streamed["model_id"]
    manifests = [Manifests(each.root).by_id(parse_model_id(here["model_id"])) for each in (home, elsewhere)]
    first, second = [signed.manifest for signed in manifests if signed is not None]
    assert first.layers == second.layers and len(first.layers.files) == 3 and first.files == second.files


def test_a_file_that_was_replaced_on_the_hub_is_said(
    home: Home,
    hub: HubServer,  # noqa: F811
    gguf_recipe: Any,
    tiny_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHSWARM_CACHE", str(tmp_path / "cache"))
    ref = "hf:owner/repo/tiny.gguf"
    hub.put_repo("owner/repo", {"tiny.gguf": tiny_file.read_bytes()})
    first = published(home, ref)
    hub.put_repo("owner/repo", {"tiny.gguf": gguf_recipe(n_layers=5).file(seed=9)})
    for take in (published, lambda home, ref: Store(home.root).obtain(ref)):
        with pytest.raises(SourceChangedError, match=f"gave the model {first['model_id']} before"):
            take(home, ref)
    assert trust(home, ref, None) == {"source": ref, "changed": True}
    assert published(home, ref)["model_id"] != first["model_id"]


def test_a_person_says_whose_a_name_is(home: Home, tiny_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = published(home, str(tiny_file))
    told = trust(home, "tiny", str(OTHER.peer_id))
    assert told == {"name": "tiny", "publisher": str(OTHER.peer_id), "was": own["publisher"], "changed": True}
    assert not trust(home, "tiny", str(OTHER.peer_id))["changed"]
    assert trust(home, "tiny", None)["changed"] and not trust(home, "tiny", None)["changed"]
    for wrong in ("nobody", own["publisher"][:-1], model_id_text(bytes(32))):
        with pytest.raises(ConfigError, match="PeerId"):
            trust(home, "tiny", wrong)
    with pytest.raises(ConfigError, match="not a model's name"):
        trust(home, "No Name", None)
    with pytest.raises(ConfigError, match="is a source, and has no publisher"):
        trust(home, "hf:a/b/c.gguf", str(OTHER.peer_id))
    show_trust(told)
    show_trust(trust(home, "tiny", None))
    show_trust(trust(home, "hf:a/b/c.gguf", None))
    show_published(own)
    show_published({**own, "reach": {"swarm": "our team", "address": "PEER@192.0.2.1:4000"}})
    show_facts(describe(home, own["model_id"], MemoryQuestion(64, 1), None))
    shown = capsys.readouterr().out
    assert f"is {OTHER.peer_id}'s, not {own['publisher']}'s any more" in shown and "as it was" in shown
    assert f"id {own['model_id']}" in shown and shown.count("apache-2.0") == 3, "also by `models show`"
    assert "Others fetch it with: meshswarm models pull tiny --swarm 'our team' --join PEER@192.0.2.1:4000\n" in shown


def test_the_commands(home: Home, tiny_file: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["--home", str(home.root), "models", *arguments])

    said = run("publish", str(tiny_file), "--no-calibrate", "--name", "my-tiny", "--json")
    assert said.exit_code == 0 and '"name": "my-tiny"' in said.stdout
    again = run("publish", "tiny", "--no-calibrate", "--name", "also-mine").stdout
    assert "also-mine is published" in again and "models pull also-mine --swarm SWARM --join ADDRESS" in again
    assert "tiny (published as " in run("list").stdout and "tiny (published as " in run("show", "tiny").stdout
    assert "nobody's again" in run("trust", "my-tiny", "--forget").stdout
    assert run("trust", "my-tiny").exit_code == run("trust", "my-tiny", str(OTHER.peer_id), "--forget").exit_code == 2

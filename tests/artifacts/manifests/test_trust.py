"""Whose a name is: the first publisher's, loudly, whatever happens to the folder and whoever writes meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.artifacts.manifests import trust as module
from meshswarm.artifacts.manifests.catalogue import CATALOGUE
from meshswarm.artifacts.manifests.layer_ranges import LayerRanges, Run
from meshswarm.artifacts.manifests.manifest import Manifest, ManifestFile, SignedManifest
from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests, SourceChangedError
from meshswarm.artifacts.merkle import model_id, model_id_text
from meshswarm.errors import ArtifactError
from meshswarm.identity import Identity

OWNER, OTHER = Identity.from_seed(b"1" * 32), Identity.from_seed(b"2" * 32)
DAY_S = 1_800_000_000.0


def manifest(name: str = "tiny", number: int = 1, root: bytes = b"r" * 32) -> Manifest:
    layers = LayerRanges(1, ((Run(1, 64, 128), Run(0, 128, 4096)),))
    own_id = model_id([(4096, root)])
    return Manifest(number, name, own_id, "llama", "q4_1", 64, 64, 32, (ManifestFile(4096, root, 64),), layers)


@pytest.fixture
def kept(tmp_path: Path) -> Manifests:
    return Manifests(tmp_path, clock=lambda: DAY_S)


def test_the_first_publisher_of_a_name_is_its_owner(kept: Manifests, tmp_path: Path) -> None:
    signed = manifest().sign(OWNER)
    assert (kept.by_name("tiny"), kept.pinned("tiny"), kept.pin("tiny")) == (None, None, None)
    assert kept.accept(signed) is signed
    again = Manifests(tmp_path)
    assert again.by_name("tiny") == again.by_id(signed.manifest.model_id) == signed
    assert again.pinned("tiny") == signed.manifest.model_id
    assert [(pin.name, pin.publisher, pin.since) for pin in again.pins()] == [
        ("tiny", OWNER.peer_id, "since 2027-01-15")
    ]


def test_another_publisher_is_refused_loudly(kept: Manifests) -> None:
    mine, theirs = manifest().sign(OWNER), manifest(number=99, root=b"x" * 32).sign(OTHER)
    kept.accept(mine)
    with pytest.raises(ManifestChangedError) as refusal:
        kept.accept(theirs)
    for told in (OWNER.peer_id, OTHER.peer_id, "since 2027-01-15", f"meshswarm models trust tiny {OTHER.peer_id}"):
        assert str(told) in str(refusal.value)
    assert model_id_text(mine.manifest.model_id) in str(refusal.value)
    assert kept.by_name("tiny") == mine
    kept.trust("tiny", OTHER.peer_id)
    assert kept.by_name("tiny") is None, "what the one before said does not count any more"
    with pytest.raises(ManifestChangedError):
        kept.accept(mine)
    assert kept.accept(theirs) == kept.by_name("tiny") == theirs


def test_a_newer_edition_replaces_and_an_older_does_not(kept: Manifests) -> None:
    first, second = manifest(number=5).sign(OWNER), manifest(number=6, root=b"n" * 32).sign(OWNER)
    kept.accept(first)
    assert kept.accept(second) == second
    assert kept.accept(first) == kept.by_name("tiny") == second
    assert kept.by_id(first.manifest.model_id) == first, "a root once seen is kept"
    equivocal = replace(second.manifest, licence="mit").sign(OWNER)
    assert kept.accept(equivocal) == second
    assert kept.next_number("tiny") == int(DAY_S * 1000) > second.manifest.number
    late = manifest(number=10**15).sign(OWNER)
    assert kept.accept(late) == late
    assert kept.next_number("tiny") == 10**15 + 1


def test_what_is_said_of_a_model_by_its_id_gives_its_name_no_meaning(kept: Manifests) -> None:
    stranger = manifest("famous-model").sign(OTHER)
    kept.keep(stranger)
    assert kept.by_id(stranger.manifest.model_id) == stranger
    assert kept.by_name("famous-model") is None and kept.pins() == []
    mine = manifest("mine", number=0).sign(OWNER)
    kept.accept(mine)
    assert kept.by_id(mine.manifest.model_id) == mine, "whose name belongs to him comes first"


def test_forgetting_a_name_frees_it(kept: Manifests) -> None:
    assert not kept.forget("tiny")
    kept.accept(manifest().sign(OWNER))
    kept.accept(manifest("a.tiny").sign(OTHER))
    assert kept.forget("tiny") and kept.by_name("a.tiny") is not None
    kept.accept(manifest().sign(OTHER))
    for name in ("../tiny", "*", "", "a/b"):
        assert kept.pin(name) is None and not kept.forget(name)
        with pytest.raises(ValueError, match="not a model's name"):
            kept.trust(name, OWNER.peer_id)


def test_a_manifest_against_the_proved_header_is_refused(kept: Manifests, gguf_recipe: type, tmp_path: Path) -> None:
    header = read_header(gguf_recipe(n_layers=3).write(tmp_path / "other.gguf"))
    liar = manifest().sign(OWNER)
    with pytest.raises(ArtifactError, match="that the model's own header does"):
        kept.accept(liar, header=header)
    assert kept.pin("tiny") is None
    with pytest.raises(ArtifactError, match="that the model's own header does"):
        kept.keep(liar, header=header)
    assert kept.by_id(liar.manifest.model_id) is None
    kept.keep(liar)
    assert kept.by_id(liar.manifest.model_id, header=header) is None
    assert kept.by_id(liar.manifest.model_id) is None, "it is gone"


@given(damage=st.binary(max_size=80))
@settings(max_examples=30)
def test_a_damaged_file_loses_the_manifest_and_never_the_pin(
    damage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = Manifests(tmp_path_factory.mktemp("home"), clock=lambda: DAY_S)
    signed = manifest().sign(OWNER)
    kept.accept(signed)
    for path in kept._folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            path.write_bytes(damage)
    (kept._names / "nonsense.json").write_bytes(damage)
    assert kept.by_name("tiny") is None and kept.by_id(signed.manifest.model_id) is None
    with pytest.raises(ManifestChangedError, match="for an unknown time"):
        kept.accept(manifest(number=9).sign(OTHER))
    assert kept.accept(signed) == kept.by_name("tiny") == kept.by_id(signed.manifest.model_id) == signed


def test_one_put_under_another_s_name_on_the_disk_is_not_believed(kept: Manifests) -> None:
    kept.accept(manifest("one").sign(OWNER))
    kept.accept(manifest("two").sign(OTHER))
    one, two = (next(kept._names.glob(f"*.{name}.json")) for name in ("one", "two"))
    one.write_bytes(two.read_bytes())
    assert kept.by_name("one") is None and kept.pin("one") is not None


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("a file")
    with pytest.raises(ArtifactError, match="manifests cannot be used"):
        Manifests(tmp_path).accept(manifest().sign(OWNER))


def test_old_ones_go_where_there_are_too_many(kept: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    for number in range(6):
        kept.keep(manifest(root=bytes([number]) * 32).sign(OTHER))
    assert len(list(kept._models.glob("*.manifest"))) == 3


ACCEPT = """
import sys
from pathlib import Path
from meshswarm.artifacts.manifests.manifest import SignedManifest
from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests
home, *files = map(Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
for file in files:
    try:
        Manifests(home).accept(SignedManifest.parse(file.read_bytes()))
        print("taken", flush=True)
    except ManifestChangedError:
        print("refused", flush=True)
"""


def _written(folder: Path, signed: SignedManifest) -> str:
    path = folder / f"{signed.publisher}-{signed.manifest.name}-{signed.manifest.number}"
    path.write_bytes(signed.wire)
    return str(path)


def _race(home: Path, *files_of_each: list[str]) -> list[list[str]]:
    """What processes that begin at the same moment say of each file."""
    run: Callable[[list[str]], subprocess.Popen[str]] = lambda files: subprocess.Popen(  # noqa: E731
        [sys.executable, "-c", ACCEPT, str(home), *files], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    racers = [run(files) for files in files_of_each]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    return [racer.communicate(timeout=60)[0].split() for racer in racers]


def test_of_publishers_who_claim_names_at_the_same_moment_one_gets_each(tmp_path: Path) -> None:
    names = [f"name-{n}" for n in range(12)]
    home = tmp_path / "home"
    claims = [[_written(tmp_path, manifest(name).sign(each)) for name in names] for each in (OWNER, OTHER)]
    said = _race(home, *claims)
    assert [sorted(pair) for pair in zip(*said, strict=True)] == [["refused", "taken"]] * len(names)
    kept = Manifests(home)
    for name, (first, _) in zip(names, zip(*said, strict=True), strict=True):
        pin = kept.pin(name)
        assert pin is not None and pin.publisher == (OWNER if first == "taken" else OTHER).peer_id


def test_editions_that_arrive_at_the_same_moment_leave_the_newest(tmp_path: Path) -> None:
    home = tmp_path / "home"
    numbers = list(range(1, 25))
    said = _race(home, *([_written(tmp_path, manifest(number=n).sign(OWNER)) for n in numbers[at::2]] for at in (0, 1)))
    assert said == [["taken"] * 12] * 2
    signed = Manifests(home).by_name("tiny")
    assert signed is not None and signed.manifest.number == 24


def test_a_source_gives_one_model_until_a_person_says_otherwise(kept: Manifests, tmp_path: Path) -> None:
    ref, first, second = "hf:owner/repo/tiny.gguf", b"a" * 32, b"b" * 32
    assert kept.source(ref) is None and not kept.forget_source(ref)
    kept.note_source(ref, first)
    kept.note_source(ref, first)
    assert Manifests(tmp_path).source(ref) == first and kept.source("hf:owner/repo/other.gguf") is None
    with pytest.raises(SourceChangedError) as refusal:
        kept.note_source(ref, second)
    for told in (model_id_text(first), model_id_text(second), f"meshswarm models trust {ref} --forget"):
        assert told in str(refusal.value)
    for path in kept._sources.iterdir():
        path.write_bytes(b"damaged")
    assert kept.source(ref) == first
    assert kept.forget_source(ref)
    kept.note_source(ref, second)
    assert kept.source(ref) == second


def test_the_catalogue_knows_the_ids_of_files_that_were_seen(kept: Manifests) -> None:
    unknown = next(entry for entry in CATALOGUE if entry.model_id is None)
    assert kept.catalogue() == CATALOGUE
    kept.note_source(unknown.ref, b"s" * 32)
    (changed,) = set(kept.catalogue()) - set(CATALOGUE)
    assert changed == replace(unknown, model_id=b"s" * 32)
    assert "was never run here" in changed.warning

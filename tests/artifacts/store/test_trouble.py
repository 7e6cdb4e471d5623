"""What goes wrong around a store: full disks, changing files, kills, two at once, names that are paths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.store import headers
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError

POSIX_ONLY = pytest.mark.skipif(sys.platform == "win32", reason="limits and signals of POSIX")

IMPORT = """
import resource, sys
from pathlib import Path
from meshswarm.artifacts.store import headers
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError
home, path, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
if limit:
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    print(Store(home).import_file(path, progress=lambda done, total: print(done, flush=True)).id_text)
except ArtifactError as error:
    print("refused:", error)
"""
CUT = """
import sys
from pathlib import Path
from meshswarm.artifacts.store import headers
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError
from meshswarm.span import Span
from meshswarm.stage.slices.store import Slices
home = Path(sys.argv[1])
store = Store(home)
(info,) = store.models()
if len(sys.argv) > 2:
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
print("cutting", flush=True)
try:
    print(Slices(store, home).file(info.model_id, Span(10, 20)).root.hex(), flush=True)
except ArtifactError as error:
    print("refused:", error)
"""


@pytest.fixture
def tiny(tmp_path: Path, gguf_recipe: Any) -> Path:
    return gguf_recipe(n_embd=128).write(tmp_path / "tiny.gguf", seed=1)


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def last_line(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    return output.strip().split("\n")[-1]


def test_two_imports_of_one_file_at_once(tmp_path: Path, smollm2: Path) -> None:
    processes = [python(IMPORT, tmp_path / "home", smollm2, 0) for _ in range(2)]
    ids = {last_line(process) for process in processes}
    (info,) = Store(tmp_path / "home").models()
    assert ids == {info.id_text}
    assert not list((tmp_path / "home").rglob("*.new"))


@POSIX_ONLY
@pytest.mark.parametrize("limit", [1, 5_000])
def test_a_disk_that_fills_at_import_leaves_the_store_as_it_was(tmp_path: Path, tiny: Path, limit: int) -> None:
    """By a limit on file sizes, at which writes end as they do on a full disk."""
    home = tmp_path / "home"
    line = last_line(python(IMPORT, home, tiny, limit))
    assert line.startswith("refused: ") and "cannot be written: File too large" in line
    assert not list(home.rglob("*.new"))
    assert Store(home).models() == [] and tiny.is_file()
    assert last_line(python(IMPORT, home, tiny, 0)) == Store(home).models()[0].id_text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "meshswarm-test", str(folder)]
    if (
        sys.platform != "linux"
        or os.getuid() != 0
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a small file system takes root on Linux")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_said_and_nothing_is_lost(small_disk: Path, smollm2: Path) -> None:
    """Really full: the header's proof does not fit, then a slice does not, and after room was made both do."""
    home = small_disk / "home"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3 << 20))
    with pytest.raises(ArtifactError, match=r"cannot be written: No space left on device"):
        Store(home).import_file(smollm2)
    assert not list(home.rglob("*.proof")) and not list(home.rglob("*.new"))
    filler.unlink()
    info = Store(home).import_file(smollm2)
    line = last_line(python(CUT, home))
    assert line.startswith("refused: the layers 10:20 of ") and "No space left on device" in line
    assert not [path for path in (home / "slices").rglob("*") if path.is_file()]
    assert Store(home).models() == [info]


@POSIX_ONLY
def test_a_file_limit_at_slicing_leaves_no_slice(tmp_path: Path, smollm2: Path) -> None:
    home = tmp_path / "home"
    Store(home).import_file(smollm2)
    line = last_line(python(CUT, home, 1 << 20))
    assert line.startswith("refused: ") and "File too large" in line
    assert not [path for path in (home / "slices").rglob("*") if path.is_file()]


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite", "replace"])
def test_a_file_that_changes_while_it_is_imported_is_refused(tmp_path: Path, tiny: Path, change: str) -> None:
    store = Store(tmp_path / "home")
    changed = False

    def meddle(done: int, _total: int) -> None:
        nonlocal changed
        if changed or done < 1:
            return
        changed = True
        match change:
            case "grow":
                with tiny.open("ab") as file:
                    file.write(b"more")
            case "shrink":
                os.truncate(tiny, tiny.stat().st_size - 4)
            case "rewrite":
                with tiny.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"!")
                os.utime(tiny, ns=(1, 1))
            case _:
                other = tiny.with_name("other")
                other.write_bytes(tiny.read_bytes())
                other.replace(tiny)

    with pytest.raises(ArtifactError, match=r"changed while it was being|is refused"):
        store.import_file(tiny, progress=meddle)
    assert changed and store.models() == []


@POSIX_ONLY
@pytest.mark.parametrize("phase", ["hashing", "cutting", "probing"])
def test_a_kill_in_any_phase_costs_nothing_but_time(tmp_path: Path, smollm2: Path, phase: str) -> None:
    home = tmp_path / "home"
    if phase == "hashing":
        process = python(IMPORT, home, smollm2, 0)
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
    else:
        Store(home).import_file(smollm2)
        process = python(CUT, home)
        wanted = "*.gguf.*.new" if phase == "cutting" else "10-20.gguf"
        began = time.monotonic()
        while not list(home.glob(f"slices/*/{wanted}")) and not list(home.glob(f"slices/*/.{wanted}")):
            assert process.poll() is None and time.monotonic() - began < 60
    process.send_signal(signal.SIGKILL)
    process.wait()
    info = Store(home).import_file(smollm2)
    assert Store(home).models() == [info]
    if phase == "hashing":
        return
    root = last_line(python(CUT, home))
    (slice_file,) = home.glob("slices/*/10-20.gguf")
    assert file_root(slice_file).hex() == root


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    store = Store(tmp_path / "home")
    for name in ("pipe.gguf", "folder.gguf", "nowhere.gguf", "loop.gguf", "dangling.gguf"):
        (tmp_path / "folder.gguf").mkdir(exist_ok=True)
        for link, target in (("loop.gguf", "loop.gguf"), ("dangling.gguf", "nowhere.gguf")):
            if not (tmp_path / link).is_symlink():
                (tmp_path / link).symlink_to(tmp_path / target)
        with pytest.raises(ArtifactError, match=r"is not a file|cannot be used"):
            store.import_file(tmp_path / name)
    assert store.models() == []


def test_a_linked_file_is_followed_and_its_name_goes_nowhere(tmp_path: Path, tiny: Path, gguf_recipe: Any) -> None:
    """As downloads of a hub lie: a link under the real name to a blob. What a file calls itself is never a path."""
    (tmp_path / "snapshots").mkdir()
    link = tmp_path / "snapshots" / "Tiny-1M.F32.gguf"
    link.symlink_to(tiny)
    store = Store(tmp_path / "home")
    info = store.import_file(tmp_path / "snapshots" / ".." / "snapshots" / link.name)
    assert info.name == "tiny-1m" and file_root(store.path(info.model_id)) == file_root(tiny)
    hostile = gguf_recipe()
    hostile.entries["general.name"] = (8, "../../../etc/cron.d/evil\0\n")
    bent = store.import_file(hostile.write(tmp_path / "model.gguf"))
    assert bent.name == "etc-cron.d-evil"
    inside = {path.resolve().parent.parent for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert inside == {(tmp_path / "home").resolve()}


def test_a_home_that_points_elsewhere_by_links_is_not_written_through(tmp_path: Path, tiny: Path) -> None:
    """A link where a note should be is replaced, never followed."""
    home, precious = tmp_path / "home", tmp_path / "precious"
    precious.write_text("precious")
    store = Store(home)
    info = store.import_file(tiny)
    note = home / "models" / f"{info.id_text}.json"
    note.unlink()
    note.symlink_to(precious)
    assert Store(home).models() == []
    assert Store(home).import_file(tiny) == info
    assert precious.read_text() == "precious" and not note.is_symlink()


@pytest.mark.parametrize("damage", [b"", b"something else", None])
def test_a_damaged_header_costs_one_model_and_only_until_it_is_fetched_again(
    tmp_path: Path, tiny: Path, gguf_recipe: Any, damage: bytes | None
) -> None:
    publisher = Store(tmp_path / "publisher")
    foreign = publisher.import_file(gguf_recipe(n_layers=5).write(tmp_path / "foreign.gguf"))
    message = publisher.header_proof(foreign.model_id)
    store = Store(tmp_path / "home")
    own = store.import_file(tiny)
    store.save_foreign_header(foreign.model_id, message)
    store.note_ranges(foreign.model_id, "foreign", [[]])
    assert store.parts() == [foreign.model_id]
    (tmp_path / "home" / "headers" / f"{foreign.id_text}.proof").write_bytes(message[:-5] if damage is None else damage)
    again = Store(tmp_path / "home")
    found = again.find_any(own.name)
    assert found is not None and found.model_id == own.model_id
    assert again.known() == [own.model_id]
    assert not again.has_header(foreign.model_id), "so it is asked for again"
    again.save_foreign_header(foreign.model_id, message)
    assert again.parts() == [foreign.model_id] and again.find_any("foreign") is not None


def test_headers_of_many_models_take_bounded_memory(
    tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's header may have 64 MiB, and he may publish any number of models."""
    publisher, store = Store(tmp_path / "publisher"), Store(tmp_path / "home")
    monkeypatch.setattr(headers, "MAX_IN_MEMORY_BYTES", 3 * 32_768)
    ids = []
    for n_layers in range(2, 9):
        path = gguf_recipe(n_layers=n_layers).write(tmp_path / f"{n_layers}.gguf")
        ids.append(publisher.import_file(path).model_id)
        store.save_foreign_header(ids[-1], publisher.header_proof(ids[-1]))
    for model_id in [*ids, *reversed(ids)]:
        assert store.header(model_id).raw
        kept = store._headers._proved
        assert sum(proof.blocks_length for proof, _ in kept.values()) <= 3 * 32_768
        assert model_id in kept
    monkeypatch.setattr(headers, "MAX_IN_MEMORY_BYTES", 1)
    store.header(ids[0])
    store.header(ids[-1])
    assert list(store._headers._proved) == [ids[-1]]

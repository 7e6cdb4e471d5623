"""References to servers and hubs, fetched through the hub's real client from servers on loopback."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.artifacts.sources.web_server import COMMIT, HubServer, Quirk, WebServer

from meshswarm.artifacts import sources
from meshswarm.artifacts.files import read_json
from meshswarm.artifacts.merkle import file_root, model_id
from meshswarm.artifacts.sources import download, hf
from meshswarm.artifacts.sources.faults import DeniedError, MissingError, PassingError, SourceError
from meshswarm.artifacts.sources.hub_ref import HubRef
from meshswarm.artifacts.sources.pace import DownloadProgress, Retries
from meshswarm.artifacts.sources.url_rules import UrlRules
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError, ConfigError

REF = "hf:owner/Tiny-GGUF/Tiny-Q4.gguf"
TOKEN = "hf_a-token-that-nobody-may-see"


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hf, download):
        monkeypatch.setattr(module, "Retries", lambda: Retries(first_wait_s=0.01))


def test_a_file_on_a_web_server_becomes_a_model(web: WebServer, model: bytes, tmp_path: Path) -> None:
    web.put("/some/Tiny Model-Q4_0.gguf", model)
    ref = web.url("/some/Tiny%20Model-Q4_0.gguf?download=true")
    told: list[tuple[int, int]] = []
    rates: list[DownloadProgress] = []
    path = sources.fetch(ref, folder=tmp_path, progress=lambda *now: told.append(now), rate=rates.append)
    assert path.name == "Tiny_Model-Q4_0.gguf" and path.read_bytes() == model
    assert told[-1] == (len(model), len(model)) == (rates[-1].done_bytes, rates[-1].total_bytes)
    web.close()
    assert sources.fetch(ref, folder=tmp_path) == path, "needs no network any more"


def test_a_store_obtains_it(
    hub: HubServer, web: WebServer, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHSWARM_CACHE", str(tmp_path / "cache"))
    hub.put_repo("owner/Tiny-GGUF", {"Tiny-Q4.gguf": model})
    web.put("/Tiny-Q4.gguf", model)
    store = Store(tmp_path / "home")
    info = store.obtain(REF)
    assert info.name == "tiny" and store.path(info.model_id).read_bytes() == model
    assert store.obtain(web.url("/Tiny-Q4.gguf")).model_id == info.model_id, "one content, two sources"


def test_the_files_of_a_split_model_come_together(hub: HubServer, web: WebServer, model: bytes, tmp_path: Path) -> None:
    parts = {f"q4/Tiny-0000{n}-of-00003.gguf": model[:-n] for n in (1, 2, 3)}  # containers need not be whole here
    hub.put_repo("owner/Split", {**parts, "README.md": b"hello"})
    for name, data in parts.items():
        web.put(f"/{name}", data)
    told: list[tuple[int, int]] = []
    with pytest.raises(ArtifactError, match="refused"):
        sources.fetch("hf:owner/Split/q4/Tiny-00002-of-00003.gguf", folder=tmp_path)
    longer = {f"q4/Tiny-0000{n}-of-00003.gguf": model + bytes(n) for n in (1, 2, 3)}
    hub.put_repo("owner/Split", longer)
    for ref in ("hf:owner/Split/q4/Tiny-00002-of-00003.gguf", web.url("/q4/Tiny-00003-of-00003.gguf?a=b")):
        for name, data in longer.items():
            web.put(f"/{name}", data)
        path = sources.fetch(ref, folder=tmp_path, progress=lambda *now: told.append(now))
        assert path.name == "Tiny-00001-of-00003.gguf"
        for n in (1, 2, 3):
            assert path.with_name(f"Tiny-0000{n}-of-00003.gguf").read_bytes() == model + bytes(n)
        assert told[-1][0] == 3 * len(model) + 6
        whole_id = model_id(
            [(len(model) + n, file_root(path.with_name(f"Tiny-0000{n}-of-00003.gguf"))) for n in (1, 2, 3)]
        )
        assert sources.fetch(ref, folder=tmp_path, expected_id=whole_id) == path
    with pytest.raises(ArtifactError, match="is not the model it should be"):
        sources.fetch(ref, folder=tmp_path / "new", expected_id=bytes(32))
    assert not list((tmp_path / "new").rglob("*.gguf"))


def test_a_hub_file_is_pinned_to_its_commit_and_checked_by_its_sha256(
    hub: HubServer, model: bytes, tmp_path: Path
) -> None:
    hub.put_repo("owner/Tiny-GGUF", {"Tiny-Q4.gguf": model})
    path = sources.fetch(REF, folder=tmp_path)
    assert path.name == "Tiny-Q4.gguf" and path.read_bytes() == model
    resolved = [seen.path for seen in hub.seen]
    assert resolved[0] == "/owner/Tiny-GGUF/resolve/main/Tiny-Q4.gguf"
    assert set(resolved[1:]) == {f"/owner/Tiny-GGUF/resolve/{COMMIT}/Tiny-Q4.gguf"}
    assert sources.fetch(f"{REF}@{COMMIT}", folder=tmp_path).read_bytes() == model
    hub.blob(model).always = Quirk(flips=(len(model) - 1,))
    with pytest.raises(ArtifactError, match="its SHA-256 differs"):
        sources.fetch(REF, folder=tmp_path / "new")
    hub.blob(model).data = model[:-1]
    with pytest.raises(SourceError, match=f"not the {len(model)} that it should have"):
        sources.fetch(REF, folder=tmp_path / "new")


def test_the_token_goes_to_the_hub_alone_and_into_no_log(
    hub: HubServer,
    cdn: WebServer,
    model: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.put_repo("owner/Tiny-GGUF", {"Tiny-Q4.gguf": model}, allowed=frozenset({TOKEN}), is_gated=True)
    said: list[str] = []
    hub.blob(model).quirks = deque([Quirk(cut_after=1_000_000), Quirk(status=403), Quirk(cut_after=1_000_000)])
    path = sources.fetch(REF, folder=tmp_path, say=said.append)
    assert path.read_bytes() == model
    assert all(seen.headers.get("authorization") == f"Bearer {TOKEN}" for seen in hub.seen) and len(hub.seen) >= 3
    assert len(cdn.seen) == 4 and not any("authorization" in seen.headers for seen in cdn.seen)
    for text in (caplog.text, "".join(said), *(file.read_text("latin-1") for file in tmp_path.rglob("*.json"))):
        assert TOKEN not in text
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpcore2", "httpx2"))]
    assert "secret-of-the-cdn" not in "".join([*said, *ours]), "the hub's client logs it when it debugs; we do not"


def test_what_the_hub_refuses_is_said_with_what_to_do(
    hub: HubServer, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put_repo("owner/Tiny-GGUF", {"Tiny-Q4.gguf": model}, allowed=frozenset({TOKEN}), is_gated=True)
    hub.put_repo("owner/Private", {"Tiny-Q4.gguf": model}, allowed=frozenset({TOKEN}))
    hub.put_repo("owner/Open", {"Tiny-Q4.gguf": model, "Tiny-Q8.gguf": model, "README.md": b"hello"})
    gated = rf"owner/Tiny-GGUF is gated: accept its terms at {hub.origin}/owner/Tiny-GGUF, then set HF_TOKEN"
    for ref, kind, message in (
        (REF, DeniedError, gated),
        ("hf:owner/Private/Tiny-Q4.gguf", MissingError, "no repository owner/Private .*if it is private, set HF_TOKEN"),
        ("hf:owner/Nothing/Tiny-Q4.gguf", MissingError, "there is no repository owner/Nothing"),
        ("hf:owner/Open/Tiny-Q5.gguf", MissingError, r"no file Tiny-Q5\.gguf\. It has: Tiny-Q4\.gguf, Tiny-Q8\.gguf$"),
        ("hf:owner/Open/Tiny-Q4.gguf@old", MissingError, "owner/Open has no revision old"),
        (
            "hf:owner/Open",
            ConfigError,
            r"names no file: write hf:owner/Open/FILE\.gguf\. It has: Tiny-Q4",
        ),
    ):
        with pytest.raises(kind, match=message):
            sources.fetch(ref, folder=tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_of-somebody-else")
    with pytest.raises(DeniedError, match="gated, and your token's account may not read it"):
        sources.fetch(REF, folder=tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set; unset it, or give a file's path"):
        sources.fetch(REF, folder=tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.close()
    with pytest.raises(PassingError, match=f"{hub.origin} cannot be reached .*is this machine online"):
        sources.fetch("hf:owner/Open/Tiny-Q4.gguf", folder=tmp_path)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_hub_that_is_none_and_one_without_encryption_get_no_further(
    hub: HubServer, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    web.put("/owner/Tiny-GGUF/resolve/main/Tiny-Q4.gguf", b"GGUF")
    monkeypatch.setattr(constants, "ENDPOINT", web.origin)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", web.origin + template)
    with pytest.raises(SourceError, match="does not answer as a hub does: check HF_ENDPOINT"):
        sources.fetch(REF, folder=tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://hub.example" + template)
    with pytest.raises(SourceError, match=r"http://hub\.example is not encrypted"):
        sources.fetch(REF, folder=tmp_path)


def test_references_to_the_hub_are_read_strictly() -> None:
    assert HubRef.parse("hf:a/b/c/d.gguf@refs/pr/1") == HubRef("a", "b", "c/d.gguf", "refs/pr/1")
    assert HubRef.parse("hf:a/b/x-00002-of-00003.gguf").files == tuple(f"x-0000{n}-of-00003.gguf" for n in (1, 2, 3))
    for wrong in (
        "hf:a/b",
        "hf:a/b.gguf",
        "hf:a/b/readme.md",
        "hf:a/b/../c.gguf",
        "hf:a/b/./c.gguf",
        "hf:a/b//c.gguf",
        "hf:../b/c.gguf",
        "hf:a/../c.gguf",
        "hf:a/b/c.gguf@../x",
        "hf:a/b/c.gguf@",
        "hf:a/b/c?d.gguf",
        "hf:a/b/c\\d.gguf",
        "hf:a/b/x-00004-of-00003.gguf",
        "hf:a/b/x-00001-of-99999.gguf",
    ):
        with pytest.raises(ConfigError):
            HubRef.parse(wrong)
    here = Path("/x")
    places = {
        HubRef.parse(ref).targets(here)[0] for ref in ("hf:a/b/c/d.gguf", "hf:a/b/e/d.gguf", "hf:a/b/c/d.gguf@v1")
    }
    assert len(places) == 3 and all(path.name == "d.gguf" and path.is_relative_to(here) for path in places)


CHILD = """
import sys
from meshswarm.artifacts import sources
from meshswarm.artifacts.sources import part_file
part_file.SYNC_BYTES = 1 << 20
print(sources.fetch(sys.argv[1], say=print), flush=True)
"""


def synced(folder: Path) -> int:
    """How much of the download the last process noted."""
    notes = [read_json(path) for path in folder.rglob(".*.part.json")]
    return max((note["n_synced"] for note in notes if note), default=0)


def test_a_killed_download_goes_on_in_the_next_process(
    hub: HubServer, cdn: WebServer, model: bytes, tmp_path: Path
) -> None:
    """A real process, told of hub and token by its environment, killed with SIGKILL at several places."""
    data = model + bytes(4 << 20)
    hub.put_repo("owner/Tiny-GGUF", {"Tiny-Q4.gguf": data}, allowed=frozenset({TOKEN}))
    blob = hub.blob(data)
    path = f"/blob/{hashlib.sha256(data).hexdigest()}"
    environment = {**os.environ, "HF_ENDPOINT": hub.origin, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    environment |= {"MESHSWARM_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    blob.always = Quirk(bytes_s=4_000_000)
    starts: list[int] = []
    for n in range(3):
        had = synced(tmp_path)
        child = subprocess.Popen([sys.executable, "-c", CHILD, REF], env=environment, stdout=subprocess.PIPE, text=True)
        if n == 2:
            blob.always = Quirk()
            out, _ = child.communicate(timeout=60)
            assert child.returncode == 0
        else:
            deadline = time.monotonic() + 60
            while synced(tmp_path) <= had:
                assert time.monotonic() < deadline and child.poll() is None
                time.sleep(0.002)
            time.sleep(0.03 * n)  # amid writing, syncing or noting
            child.send_signal(signal.SIGKILL)
            child.communicate()
        starts.append(cdn.gets(path)[n].start or 0)
        assert starts[n] == had, "it goes on from what the last one had synced"
    fetched = Path(out.strip().splitlines()[-1])
    assert fetched.read_bytes() == data
    assert 0 == starts[0] < starts[1] < starts[2]


def test_a_person_may_aim_at_loopback_and_a_stranger_may_not(
    hub: HubServer, web: WebServer, model: bytes, tmp_path: Path
) -> None:
    web.put("/a.gguf", model)
    with pytest.raises(SourceError, match="must be public"):
        sources.fetch(web.url("/a.gguf"), folder=tmp_path, rules=UrlRules(is_strangers=True))
    assert web.seen == []
    local = UrlRules(is_strangers=True, allow_local=True)
    assert sources.fetch(web.url("/a.gguf"), folder=tmp_path, rules=local).read_bytes() == model
    hub.put_repo("owner/Tiny-GGUF", {"Tiny-Q4.gguf": model})
    path = sources.fetch(REF, folder=tmp_path, rules=UrlRules(is_strangers=True))
    assert path.read_bytes() == model, "the hub is the person's own choice, wherever it is"

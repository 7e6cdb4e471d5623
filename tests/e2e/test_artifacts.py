"""Model files between real processes: who has nothing but a name fetches the layers it serves, and gives them on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.client import client_of, wait_until_ready
from tests.e2e.conftest import PeerProcess, StartPeer
from tests.e2e.test_private import swarm as swarm_command

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.ranges import n_bytes_of
from meshswarm.artifacts.store.store import Store
from meshswarm.span import Span
from meshswarm.stage.slices.store import Slices

NAME = "smollm2-135m-instruct"


def imported(home: Path, model: Path) -> ModelInfo:
    """As `models import` does."""
    return Store(home).import_file(model)


def answer_of(peer: PeerProcess) -> str:
    model = wait_until_ready(peer.api)
    messages: Any = [{"role": "user", "content": "Name three colours."}]
    made = client_of(peer.api).chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
    return made.choices[0].message.content or ""


def fetched(peer: PeerProcess) -> dict[str, Any]:
    return next(event for event in peer.events if event["event"] == "fetched")


def models_twice(home: Path, *arguments: str) -> list[Any]:
    """What `meshswarm models ... --json` says in two processes at the same time."""
    command = [sys.executable, "-m", "meshswarm", "--home", str(home), "models", *arguments, "--json"]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    results = []
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
        results.append(json.loads(out))
    return results


def test_peers_fetch_only_the_layers_they_serve_and_the_model_outlives_who_brought_it(
    start_peer: StartPeer, tmp_path: Path, smollm2: Path
) -> None:
    info = imported(tmp_path / "a", smollm2)
    seeder = start_peer(home="a")
    joined = ("--model", NAME, "--join", seeder.address)
    parts = {
        layers: start_peer(*joined, "--layers", layers, home=home, wait=False)
        for home, layers in (("b", "0:15"), ("c", "15:30"))
    }
    slices = Slices(Store(tmp_path / "a"), tmp_path / "a")
    for layers, peer in parts.items():
        peer.ready = peer.wait_for("ready")
        needed = sum(map(n_bytes_of, slices.needs(info.model_id, Span.parse(layers))))
        assert needed <= fetched(peer)["bytes"] <= 1.05 * (needed + info.header_length)
        on_disk = sum(file.stat().st_blocks * 512 for file in (peer.home / "pieces").rglob("*.gguf"))
        assert on_disk <= 1.05 * (needed + info.header_length) < sum(info.file_lengths), "never the whole file"
    split = answer_of(parts["0:15"])

    seeder.kill()  # without a word: what it brought lives on
    where = ("--join", parts["15:30"].address, "--swarm", start_peer.swarm)
    one, other = models_twice(tmp_path / "d", "pull", NAME, *where)
    assert one["model_id"] == other["model_id"] == info.id_text and one["local"] and other["local"]
    (path,) = (tmp_path / "d" / "pieces").rglob("*.gguf")
    assert file_root(path) == file_root(smollm2), "put together from two peers that have a part each"
    whole = start_peer("--model", NAME, home="d", swarm=f"alone-{os.urandom(4).hex()}")
    assert "fetched" not in {event["event"] for event in whole.events}
    assert split and answer_of(whole) == split


def test_in_a_private_swarm_a_fetch_that_was_killed_goes_on_where_it_was_and_leaves_a_slice_alone(
    start_peer: StartPeer, tmp_path: Path, smollm2: Path
) -> None:
    office = f"office-{os.urandom(4).hex()}"
    swarm_command(tmp_path / "a", "new", office)
    imported(tmp_path / "a", smollm2)
    seeder = start_peer("--private", home="a", swarm=office)
    invite = swarm_command(tmp_path / "a", "invite")["invite"]  # names where it listens
    swarm_command(tmp_path / "b", "join", invite)
    wanted = ("--private", "--model", NAME, "--layers", "10:12", "--slice-only")
    peer = start_peer(*wanted, "--download-rate", "1MB/s", home="b", swarm=office, wait=False)
    while (event := peer.wait_for("fetching"))["bytes"] < 2_000_000:
        pass
    peer.kill()
    again = start_peer(*wanted, home="b", swarm=office)
    assert fetched(again)["bytes"] <= event["wanted_bytes"] - 1_000_000, "half of what had come, at least, was kept"
    assert not list((again.home / "pieces").rglob("*.gguf"))
    assert again.ready["layers"] == "10:12" and seeder.process.poll() is None

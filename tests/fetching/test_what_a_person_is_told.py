"""What a person hears of fetching: stops and goes on, waits, is told who gives nothing, and what is gone."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fetching.conftest import StartNode, eventually

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.store.store import Store
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import ArtifactError, UnknownModelError
from meshswarm.fetching import fetch as fetch_module
from meshswarm.fetching import library as library_module
from meshswarm.fetching.library import NobodyThereError
from meshswarm.fetching.plan import FetchProgress
from meshswarm.fetching.rates import Limits
from meshswarm.fetching.sharing import SharingSettings
from meshswarm.serving.layers import known_model
from meshswarm.serving.settings import ServingSettings
from meshswarm.span import Span


async def pulling(home: Path, holder: Any, name: str) -> asyncio.subprocess.Process:
    """`models pull` in a process of its own, from `holder`."""
    join = f"{holder.endpoint.peer_id}@{holder.endpoint.address}"
    command = [sys.executable, "-m", "meshswarm", "--home", str(home), "models", "pull", name, "--join", join]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, "--swarm", holder.swarm.name, stdout=pipe, stderr=pipe)


async def test_ctrl_c_ends_a_pull_and_the_same_command_goes_on(
    start_node: StartNode, model_file: Path, tmp_path: Path
) -> None:
    holder = await start_node(settings=SharingSettings(limits=Limits(up_bytes_s=1_000_000)))
    info = await asyncio.to_thread(holder.store.import_file, model_file)
    await holder.until_seeding(info)
    home = tmp_path / "pulling"
    first = await pulling(home, holder, info.name)
    assert first.stderr is not None
    while b"MB/s from 1 peer" not in (line := await first.stderr.readline()):
        assert line, "it ended before anything came"
    first.send_signal(signal.SIGINT)
    _, said = await asyncio.wait_for(first.communicate(), 20)
    assert first.returncode == 130
    last = said.decode().splitlines()[-1]
    assert last.startswith("Stopped at ") and last.endswith(
        " of 4 MB. What came is kept; the same command goes on from there."
    )
    (held,) = Store(home).ranges(info.model_id)
    assert held
    second = await pulling(home, holder, info.name)
    _, said = await asyncio.wait_for(second.communicate(), 30)
    assert second.returncode == 0, said
    here = sum(map(len, held)) / 1e6
    assert f"Going on with {info.name}: {here:.1f} MB of what is needed are here." in said.decode()
    assert file_root(Store(home).path(info.model_id)) == file_root(model_file)


async def test_a_holder_that_goes_is_told_of_and_how_long_it_is_waited_for(
    start_node: StartNode, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(fetch_module, "IDLE_S", 0.3)
    other = await start_node()
    holder = await start_node(settings=SharingSettings(limits=Limits(up_bytes_s=1_000_000)))
    info = await asyncio.to_thread(holder.store.import_file, model_file)
    await holder.until_seeding(info)
    await other.sharing.library.known(info.name)
    seen: list[FetchProgress] = []
    fetching = asyncio.ensure_future(other.sharing.fetcher.fetch(await other.wants(info), seen.append))
    await eventually(lambda: seen and seen[-1].came_bytes > 300_000, "some of it has come")
    assert seen[-1].n_peers == 1 and seen[-1].waits_s is None
    await holder.dht.withdraw()
    await holder.leave()
    with pytest.raises(ArtifactError, match="what came is kept"):
        await fetching
    waits = [each.waits_s for each in seen if each.waits_s is not None]
    assert waits and max(waits) <= 1.0


async def test_who_serves_a_model_and_gives_no_files_is_told_of(start_node: StartNode, model_file: Path) -> None:
    silent, other = await start_node(settings=SharingSettings(seeds=False)), await start_node()
    info = await asyncio.to_thread(silent.store.import_file, model_file)
    record = CoverageRecord(
        peer=silent.endpoint.peer_id,
        addresses=tuple(silent.endpoint.addresses),
        model_id=info.model_id,
        span=Span(0, info.n_layers),
        loaded=True,
        numclass="",
        n_ctx=512,
        us_per_layer=100,
        prefill_us_per_row_layer=10,
        free_kv_tokens=0,
        roles=("server",),
    )
    await silent.dht.publish_coverage(record)
    other.store.save_foreign_header(info.model_id, silent.store.header_proof(info.model_id))
    with pytest.raises(ArtifactError, match=r"1 peer serves it, but gives no files \(--no-seed\): get it another way"):
        await other.sharing.fetcher.fetch(await other.wants(info))


async def test_a_model_that_is_removed_while_it_is_given_is_told_of_once(
    start_node: StartNode, model_file: Path
) -> None:
    holder, other = await start_node(), await start_node()
    info = await asyncio.to_thread(holder.store.import_file, model_file)
    await holder.until_seeding(info)
    known = await other.sharing.library.known(info.name)
    await other.sharing.library.have_whole(known)
    await other.until_seeding(info)
    await asyncio.to_thread(other.store.remove, info.model_id)
    await eventually(lambda: other.warnings, "it is told")
    await asyncio.sleep(1.0)  # the torrent looks at its file meanwhile
    assert other.warnings == [f"{info.name} was removed here; it is no longer given to others."]


async def test_a_model_of_which_nobody_can_know_yet_is_waited_for(
    start_node: StartNode, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_module, "LOOKUP_S", 0.1)
    early = await start_node()
    said: list[Any] = []
    around: Any = SimpleNamespace(library=early.sharing.library, dht=early.dht, report=said.append)
    with pytest.raises(NobodyThereError, match="known: none"):
        await known_model(ServingSettings("tiny-3m"), around)
    waiting = asyncio.ensure_future(known_model(ServingSettings("tiny-3m", waits=True), around))
    await eventually(lambda: said, "it says that it looks on")
    assert said == [{"event": "model", "message": "Nobody is there yet who knows tiny-3m; looking on."}]
    holder = await start_node()
    info = await asyncio.to_thread(holder.store.import_file, model_file)
    await holder.until_seeding(info)
    assert await asyncio.wait_for(waiting, 20) == info
    with pytest.raises(UnknownModelError, match=r"known: tiny-3m\); did you mean tiny-3m\?"):
        await known_model(ServingSettings("tiny3m", waits=True), around)

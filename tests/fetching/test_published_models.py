"""Models by the names that publishers gave them, from wherever their manifests say: the layers that are wanted only."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts.sources.conftest import cdn, hub  # noqa: F401
from tests.artifacts.sources.web_server import HubServer, WebServer
from tests.fetching.conftest import Node, StartNode, eventually

from meshswarm.artifacts.manifests.catalogue import CATALOGUE
from meshswarm.artifacts.manifests.trust import ManifestChangedError, Manifests
from meshswarm.artifacts.merkle import parse_model_id
from meshswarm.commands.publish import Wish, publish
from meshswarm.config import Home
from meshswarm.identity import Identity
from meshswarm.span import Span

REF = "hf:owner/repo/Tiny-3M.F32.gguf"
PIECE = 256 << 10


async def published(node: Node, ref: str, name: str) -> bytes:
    """What a person does in a shell beside the running peer; returns the model's id once it is announced."""
    wish = Wish(name=name, is_calibrated=False)
    told = await asyncio.to_thread(publish, Home(node.home), ref, wish, None, lambda _: None)
    model_id = parse_model_id(told["model_id"])

    async def is_announced() -> bool:
        return any(record.peer == node.endpoint.peer_id for record in await node.dht.holders(model_id))

    await eventually(is_announced, "the published model is announced")
    return model_id


def sent_by(server: WebServer) -> int:
    return sum(sum(request.n_sent) for request in server.seen)


def put(hub: HubServer, model_bytes: bytes) -> None:  # noqa: F811
    hub.put_repo("owner/repo", {"Tiny-3M.F32.gguf": model_bytes})


async def test_a_model_that_its_publisher_never_kept_is_served_in_parts_by_others(
    start_node: StartNode,
    hub: HubServer,  # noqa: F811
    model_bytes: bytes,
) -> None:
    """A publisher with a small disk, a hub with the file, a peer that wants three layers, and one that wants the same
    when the hub is gone."""
    put(hub, model_bytes)
    publisher, one = await start_node(), await start_node()
    model_id = await published(publisher, REF, "my-model")
    assert not list((publisher.home / "pieces").rglob("*.gguf")) and publisher.store.models() == []
    before = sent_by(hub.cdn)
    info = await one.sharing.library.known("my-model")
    assert info.model_id == model_id and Manifests(one.home).pinned("my-model") == model_id
    await one.sharing.library.have_span(info, Span(5, 8))
    wanted = sum(len(part) for part in one.sharing.library._slices.needs(model_id, Span(5, 8))[0])
    assert wanted <= sent_by(hub.cdn) - before <= wanted + 3 * PIECE < len(model_bytes) // 2
    (told,) = [event for event in one.said if event["event"] == "fetched"]
    assert told["layers"] == "5:8"

    another = await start_node()
    assert one.sharing.seeder is not None
    await one.sharing.seeder.look()
    hub.close()
    hub.cdn.close()
    known = await another.sharing.library.known("my-model")
    await another.sharing.library.have_span(known, Span(5, 8))
    assert not [warning for warning in another.warnings if "wrong" in warning]


async def test_a_file_on_the_hub_is_fetched_in_parts_where_a_trusted_publisher_tells_its_hashes(
    start_node: StartNode,
    hub: HubServer,  # noqa: F811
    model_bytes: bytes,
) -> None:
    put(hub, model_bytes)
    publisher, one = await start_node(), await start_node()
    model_id = await published(publisher, REF, "my-model")
    assert (await one.sharing.library.known("my-model")).model_id == model_id
    before = sent_by(hub.cdn)
    info = await one.sharing.library.known(REF)
    await one.sharing.library.have_span(info, Span(0, 2))
    assert info.model_id == model_id and sent_by(hub.cdn) - before < len(model_bytes) // 2
    assert not [event for event in one.said if "Fetching all of" in str(event.get("message"))]


async def test_without_that_all_of_it_is_fetched_and_a_person_is_told_why(
    start_node: StartNode,
    hub: HubServer,  # noqa: F811
    model_bytes: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHSWARM_CACHE", str(tmp_path / "cache"))
    put(hub, model_bytes)
    publisher, one = await start_node(), await start_node()
    model_id = await published(publisher, REF, "my-model")
    info = await one.sharing.library.known(REF)
    assert info.model_id == model_id and one.store.paths(model_id) is not None
    assert any(
        "no publisher known here has told the hashes of its parts" in str(event.get("message")) for event in one.said
    )
    assert Manifests(one.home).source(REF) == model_id, "and from now on it is pinned"


async def test_an_id_that_a_source_gave_before_needs_its_hashes_from_somebody(
    start_node: StartNode,
    hub: HubServer,  # noqa: F811
    model_bytes: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model was here once, then removed; nobody else has it."""
    monkeypatch.setenv("MESHSWARM_CACHE", str(tmp_path / "cache"))
    put(hub, model_bytes)
    one = await start_node()
    model_id = (await one.sharing.library.known(REF)).model_id
    one.store.remove(model_id)
    info = await one.sharing.library.known(REF)
    assert info.model_id == model_id
    assert any("nobody gives its hashes" in str(event.get("message")) for event in one.said)


async def test_a_name_whose_publisher_changed_is_not_fetched(start_node: StartNode, model_file: Path) -> None:
    first, one = await start_node(), await start_node()
    await asyncio.to_thread(first.store.import_file, model_file)
    await published(first, str(model_file), "my-model")
    Manifests(one.home).trust("my-model", Identity.generate().peer_id)
    with pytest.raises(ManifestChangedError, match="my-model is claimed by another publisher than here"):
        await one.sharing.library.known("my-model")


async def test_of_two_models_under_one_name_none_is_guessed_but_a_pinned_or_listed_one_is_taken(
    start_node: StartNode, model_file: Path, gguf_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, one = await start_node(), await start_node(), await start_node()
    own = await published(first, str(model_file), "tiny-3m")
    other = gguf_recipe(n_layers=4).write(tmp_path / "tiny-3m.gguf", seed=8)
    info = await asyncio.to_thread(second.store.import_file, other)
    await second.until_seeding(replace(info))

    async def both_are_known() -> bool:
        return len(await one.dht.models(fresh=True)) == 2

    await eventually(both_are_known, "both models are known")
    with pytest.raises(Exception, match="may be any of 2 models"):
        await one.sharing.library.known("tiny-3m")
    listed = replace(CATALOGUE[0], name="tiny-3m", encoding="f32", model_id=info.model_id)
    monkeypatch.setattr("meshswarm.fetching.library.CATALOGUE", (listed,))
    assert (await one.sharing.library.known("tiny-3m")).model_id == info.model_id, "what the program itself knows"
    Manifests(one.home).trust("tiny-3m", first.endpoint.peer_id)
    assert (await one.sharing.library.known("tiny-3m")).model_id == own

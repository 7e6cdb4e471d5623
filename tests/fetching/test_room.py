"""The disk quota from end to end: pieces and the slice cut from them are planned together, and what goes for them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from tests.fetching.conftest import Node, StartNode

from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.store.pieces import disk_bytes
from meshswarm.errors import ArtifactError
from meshswarm.fetching.sharing import SharingSettings
from meshswarm.span import Span


def taken(node: Node) -> int:
    """What the peer's own copies take."""
    return disk_bytes(node.home / "pieces") + disk_bytes(node.home / "slices")


def cut_slices(node: Node) -> set[str]:
    return {path.stem for path in (node.home / "slices").glob("*/*.gguf")}


async def has(node: Node, path: Path) -> ModelInfo:
    info = await asyncio.to_thread(node.store.import_file, path)
    await node.until_seeding(info)
    return info


async def enough(start_node: StartNode, info: ModelInfo, span: Span) -> int:
    """The quota that a peer with nothing says these layers take."""
    poor = await start_node(settings=SharingSettings(disk_bytes=1))
    await poor.sharing.library.known(info.id_text)
    with pytest.raises(ArtifactError, match=r"MB to fetch and .* MB for the slice") as refused:
        await poor.sharing.library.have_span(info, span)
    assert not poor.sharing.shelf.open_models and taken(poor) == 0, "refused before anything was fetched"
    found = re.search(r"--disk ([0-9.]+)MB", str(refused.value))
    assert found is not None
    return int(float(found[1]) * 1e6)


async def load(node: Node, info: ModelInfo, span: Span) -> None:
    """As a peer does that serves these layers; it counts as loaded after that."""
    await node.sharing.library.have_span(info, span)
    await asyncio.to_thread(node.slices.file, info.model_id, span)


async def test_layers_and_their_slice_stay_within_the_quota_that_was_said_to_be_enough(
    start_node: StartNode, model_file: Path
) -> None:
    """And other layers after them: what is loaded stays, the slice and the pieces that nobody needs go."""
    holder = await start_node()
    info = await has(holder, model_file)
    quota = await enough(start_node, info, Span(0, 8))
    node = await start_node(settings=SharingSettings(disk_bytes=quota))
    await node.sharing.library.known(info.id_text)
    await load(node, info, Span(0, 8))
    assert quota - 400_000 < taken(node) <= quota, "no more was asked for than is needed"
    await node.sharing.seeder.look()
    with pytest.raises(ArtifactError, match=r"does not fit into .* beside what is in use: it takes --disk"):
        await node.sharing.library.have_span(info, Span(10, 16))
    assert cut_slices(node) == {"0-8"} and not node.warnings, "nothing goes in vain"
    node.slices.let_go(info.model_id, Span(0, 8))
    await load(node, info, Span(10, 16))
    assert taken(node) <= quota and cut_slices(node) == {"10-16"}
    assert any("slice 0:8" in warning for warning in node.warnings)
    record = {each.peer: each for each in await holder.dht.holders(info.model_id, fresh=True)}
    await node.sharing.seeder.look()
    record = {each.peer: each for each in await holder.dht.holders(info.model_id, fresh=True)}
    layers = record[node.endpoint.peer_id].layers
    assert layers is not None and Span(10, 16).start >= layers.start and layers.stop == 16


async def test_pieces_that_lie_in_the_header_are_planned_too(
    start_node: StartNode, tmp_path: Path, gguf_recipe: Any
) -> None:
    """They are written to where others can have them, although they are not fetched."""
    recipe = gguf_recipe(n_layers=16, n_embd=96)
    recipe.entries["tokenizer.chat_template"] = (8, "x" * 900_000)
    holder = await start_node()
    path = tmp_path / "Long-header.F32.gguf"
    info = await has(holder, recipe.write(path))
    quota = await enough(start_node, info, Span(8, 16))
    node = await start_node(settings=SharingSettings(disk_bytes=quota))
    await node.sharing.library.known(info.id_text)
    await node.sharing.library.have_span(info, Span(8, 16))
    plan = node.slices.plan(info.model_id, Span(8, 16))
    assert taken(node) + plan.cut_bytes <= quota
    (held,) = node.store.ranges(info.model_id)
    assert held[0].start == 0 and held[0].stop >= 3 << 18, "the first three pieces are here"


async def test_pieces_of_other_layers_go_where_slices_are_not_enough(start_node: StartNode, model_file: Path) -> None:
    holder = await start_node()
    info = await has(holder, model_file)
    quota = await enough(start_node, info, Span(0, 8))
    node = await start_node(settings=SharingSettings(disk_bytes=quota))
    await node.sharing.library.known(info.id_text)
    await node.sharing.library.have_span(info, Span(0, 8))
    before = taken(node)
    await node.until_seeding(info)
    await node.sharing.library.have_span(info, Span(7, 15))
    assert any("pieces that are not needed" in warning for warning in node.warnings)
    plan = node.slices.plan(info.model_id, Span(7, 15))
    assert taken(node) + plan.cut_bytes <= quota and taken(node) < 1.2 * before
    node.store.readable(info.model_id, plan.needs)
    assert not [warning for warning in node.warnings if "Removed" not in warning]


async def test_a_slice_of_a_model_that_was_imported_needs_room_too(start_node: StartNode, model_file: Path) -> None:
    node = await start_node(settings=SharingSettings(disk_bytes=1_200_000))
    info = await asyncio.to_thread(node.store.import_file, model_file)
    await node.sharing.library.have_span(info, Span(0, 3))
    with pytest.raises(ArtifactError, match=r"takes \d\.\d MB for the slice"):
        await node.sharing.library.have_span(info, Span(0, 8))
    assert node.store.paths(info.model_id) == (model_file,)


async def test_what_is_coming_is_counted_until_it_is_here(start_node: StartNode, model_file: Path) -> None:
    """The slice that was planned is not given away before it is cut, nor the pieces it is cut from."""
    holder = await start_node()
    info = await has(holder, model_file)
    other = holder.store.import_file(model_file)
    quota = await enough(start_node, info, Span(0, 8))
    node = await start_node(settings=SharingSettings(disk_bytes=quota))
    await node.sharing.library.known(info.id_text)
    await node.sharing.library.have_span(info, Span(0, 8))
    with pytest.raises(ArtifactError, match="--disk"):
        await node.sharing.library.have_whole(other)
    plan = node.slices.plan(info.model_id, Span(0, 8))
    node.store.readable(info.model_id, plan.needs)


async def test_a_model_that_others_hold_goes_before_one_that_is_rare(
    start_node: StartNode, model_file: Path, tmp_path: Path, gguf_recipe: Any
) -> None:
    """By what the table says of their holders, though the rare one was not used for longer."""
    holders = [await start_node() for _ in range(3)]
    files = tmp_path / "downloads"
    rare = await has(holders[0], gguf_recipe(n_layers=4, n_embd=96).write(files / "Rare-1M.F32.gguf", seed=2))
    common, *_ = await asyncio.gather(*(has(node, model_file) for node in holders))
    small = await start_node(settings=SharingSettings(disk_bytes=4_700_000))
    for info in (rare, common):
        small.store.save_foreign_header(info.model_id, holders[0].store.header_proof(info.model_id))
        await small.sharing.library.have_whole(info)
    own = small.store.import_file(gguf_recipe(n_layers=8, n_embd=96).write(files / "Own-2M.F32.gguf", seed=3))
    await small.sharing.library.have_span(own, Span(0, 4))
    assert {info.model_id for info in small.store.models()} == {rare.model_id, own.model_id}

"""Models whose files were imported in place and then changed or moved away: it is said, and what is left is used."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.fetching.conftest import StartNode, eventually

from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.ranges import covers, n_bytes_of
from meshswarm.artifacts.store.changed import parts_left
from meshswarm.artifacts.store.store import Store

PIECE = 256 << 10


def spoil(path: Path) -> bytes:
    """Change the sixth piece. All bytes of the file then."""
    data = bytearray(path.read_bytes())
    data[5 * PIECE + 9] ^= 1
    path.write_bytes(data)
    return bytes(data)


async def test_a_file_that_was_changed_is_named_and_only_what_is_bad_comes_from_others(
    start_node: StartNode, model_file: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copy(model_file, tmp_path / model_file.name))
    holder, other = await start_node(), await start_node()
    info = await asyncio.to_thread(holder.store.import_file, model_file)
    await holder.until_seeding(info)
    await asyncio.to_thread(other.store.import_file, own)
    data = await asyncio.to_thread(spoil, own)
    for _ in range(2):
        known = await other.sharing.library.known(info.name)
    said = [event["message"] for event in other.said if event["event"] == "model"]
    (sentence,) = [sentence for sentence in said if str(own) in sentence]
    assert f"{own} was changed since it was imported" in sentence and f"models verify {info.name}`" in sentence
    await other.sharing.library.have_whole(known)
    assert file_root(other.store.path(info.model_id)) == file_root(model_file)
    await eventually(lambda: holder.sharing.shelf.sent_bytes > 0, "something came from the other")
    await holder.leave()  # which is when its last figures are there
    assert holder.sharing.shelf.sent_bytes < 2 * PIECE < len(data)
    assert await asyncio.to_thread(own.read_bytes) == data, "a person's file is only read"


async def test_what_is_right_in_a_changed_file_needs_nobody(start_node: StartNode, model_file: Path) -> None:
    alone = await start_node()
    info = await asyncio.to_thread(alone.store.import_file, model_file)
    await asyncio.to_thread(spoil, model_file)
    wanted = await alone.wants(info, (range(5 * PIECE), range(7 * PIECE, 9 * PIECE)))
    await alone.sharing.fetcher.fetch(wanted)
    (held,) = alone.store.ranges(info.model_id)
    assert covers(held, wanted.files[0]) and n_bytes_of(held) <= 8 * PIECE


async def test_a_file_that_is_gone_is_named_and_its_model_known_by_its_name(
    start_node: StartNode, model_file: Path
) -> None:
    node = await start_node()
    info = await asyncio.to_thread(node.store.import_file, model_file)
    await asyncio.to_thread(model_file.unlink)
    assert await node.sharing.library.known(info.name) == info
    assert any(f"is gone: {model_file}" in event.get("message", "") for event in node.said)


def test_files_that_were_cut_short_or_are_gone_give_what_they_have(tmp_path: Path, model_file: Path) -> None:
    store = Store(tmp_path / "home")
    model_id = store.import_file(model_file).model_id
    assert parts_left(store, model_id) == () == parts_left(store, bytes(32))
    model_file.write_bytes(model_file.read_bytes()[: 3 * PIECE + 100])
    assert parts_left(store, model_id) == ((model_file, (range(3 * PIECE),)),)
    model_file.unlink()
    assert parts_left(store, model_id) == ((model_file, ()),)

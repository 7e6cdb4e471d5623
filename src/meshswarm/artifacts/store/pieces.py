"""Files that are being fetched, or were: which of their bytes are here and known to be right, and their piece layers.

The rule this file keeps: bytes count as here only when they were verified and on disk when that was noted, and the file
was not touched since; or when they are hashed again. Under `home`: `pieces/<root>-<length>/model.gguf`, perhaps with
holes, with `ranges.json` beside it, and `layers/<root>-<length>` (the hashes of a file's pieces, BEP 52).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshswarm.artifacts.files import FileStamp, read_json, write_json, write_whole
from meshswarm.artifacts.merkle import (
    BLOCK_BYTES,
    HASH_BYTES,
    ZERO_SUBTREE,
    Progress,
    check_piece_layer,
    file_root,
    tree_depth,
)
from meshswarm.artifacts.ranges import Ranges, merged, missing
from meshswarm.artifacts.store.holes import make_holes
from meshswarm.artifacts.torrent.content import TORRENT_NAME, Content
from meshswarm.errors import ArtifactError

_VERSION = 1
_NOTE = "ranges.json"


class Pieces:
    """The fetched files in one peer's folder, by content. Methods that hash block: call them in a thread."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "pieces"
        self._layers = home / "layers"

    def path(self, content: Content) -> Path:
        """Where the file is, or would be."""
        return self.folder / _key(content) / TORRENT_NAME

    def note(self, content: Content, ranges: Iterable[range]) -> None:
        """Keep in mind that these bytes of the file were verified and are on disk, and no others.

        Raises ArtifactError when the file is not there or the disk refuses.
        """
        path = self.path(content)
        stamp = FileStamp.of(path)
        fields = {"version": _VERSION, "length": content.length}
        pairs = [[each.start, each.stop] for each in merged(ranges)]
        write_json(path.with_name(_NOTE), {**fields, "ranges": pairs, **stamp.fields()})

    def ranges(self, content: Content) -> Ranges:
        """The bytes that are here and right. Those of a file touched since they were noted are hashed again."""
        path = self.path(content)
        fields = read_json(path.with_name(_NOTE))
        if fields is None or not path.is_file() or fields.get("length") != content.length:
            return ()
        noted = _parsed_ranges(fields.get("ranges"), content.length)
        try:
            if FileStamp.from_fields(fields) == FileStamp.of(path):
                return noted
        except (KeyError, ValueError):
            return ()
        good = good_ranges(path, content, self.layer(content), noted)
        self.note(content, good)
        return good

    def drop(self, content: Content) -> int:
        """Remove the file and what is noted of it. The number of bytes it took on disk. Raises ArtifactError."""
        folder = self.path(content).parent
        n_bytes = disk_bytes(folder)
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise ArtifactError(f"{folder} cannot be removed: {error.strerror or error}") from error
        return n_bytes

    def kept(self, content: Content, ranges: Iterable[range]) -> Ranges:
        """Of what is here, the pieces that have a byte of `ranges`. Blocking where the file was touched."""
        pieces = content.pieces_within(self.ranges(content)) & content.pieces_of(ranges)
        return tuple(content.ranges_of(pieces))

    def keep_only(self, content: Content, ranges: Iterable[range]) -> int:
        """Remove all of the file but the pieces that have a byte of `ranges`. The number of bytes that are free again.
        Nobody may have the file open to write. Raises ArtifactError."""
        kept = self.kept(content, ranges)
        if not kept:
            return self.drop(content)
        path = self.path(content)
        n_bytes = disk_bytes(path.parent)
        self.note(content, kept)  # first: what goes does not count from here on, whatever happens
        make_holes(path, missing(kept, (range(content.length),)))
        self.note(content, kept)
        return n_bytes - disk_bytes(path.parent)

    def layer(self, content: Content) -> bytes | None:
        """The piece layer, checked; b"" for a file of one piece, None when it is not here."""
        if content.layer_bytes == 0:
            return b""
        try:
            with (self._layers / _key(content)).open("rb") as file:
                layer = file.read(content.layer_bytes + 1)
            check_piece_layer(content.length, content.root, content.piece_length, layer)
        except (OSError, ArtifactError):
            return None
        return layer

    def save_layer(self, content: Content, layer: bytes) -> None:
        """Keep a file's piece layer. Raises ArtifactError when it is another file's, or the disk refuses."""
        check_piece_layer(content.length, content.root, content.piece_length, layer)
        if layer and self.layer(content) is None:
            write_whole(self._layers / _key(content), layer)

    def drop_layer(self, content: Content) -> None:
        (self._layers / _key(content)).unlink(missing_ok=True)


def _key(content: Content) -> str:
    """Both: a root alone is also that of a file said to be longer, and a stranger may say so of any file."""
    return f"{content.root.hex()}-{content.length}"


def good_ranges(
    path: Path, content: Content, layer: bytes | None, ranges: Iterable[range], progress: Progress | None = None
) -> Ranges:
    """Which of `ranges` hold the file's own bytes, hashed now, by whole pieces. Blocking.

    Without the piece layer nothing but a whole file can be checked. Raises ArtifactError when reading fails.
    """
    wanted = merged(ranges)
    if not layer:
        is_whole = wanted == (range(content.length),) and FileStamp.of(path).size == content.length
        return wanted if is_whole and file_root(path, progress) == content.root else ()
    pieces = sorted(content.pieces_within(wanted))
    good = []
    try:
        with path.open("rb") as file:
            for index in pieces:
                expected = layer[index * HASH_BYTES : (index + 1) * HASH_BYTES]
                if _piece_hash(file, content.piece_range(index), content.piece_length) == expected:
                    good.append(index)
                if progress is not None:
                    progress(content.piece_range(index).stop, content.length)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    return tuple(content.ranges_of(good))


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What hashing a file again found. `checked`: the bytes looked at; `bad`: those that are not the file's, by whole
    pieces (all of them where there is no piece layer to tell which)."""

    path: Path
    checked: Ranges
    good: Ranges
    bad_pieces: tuple[int, ...]

    @property
    def bad(self) -> Ranges:
        return missing(self.good, self.checked)


def check_file(
    path: Path, content: Content, layer: bytes | None, held: Ranges, progress: Progress | None = None
) -> FileCheck:
    """Hash what is held of a file. Bytes that cannot be read, or are gone, are bad."""
    try:
        good = good_ranges(path, content, layer, held, progress)
    except ArtifactError:
        good = ()
    return FileCheck(path, held, good, tuple(sorted(content.pieces_of(missing(good, held)))))


def _piece_hash(file: IO[bytes], piece: range, piece_length: int) -> bytes:
    """The node of the file's Merkle tree above one piece: missing leaves are 32 zero bytes each (BEP 52)."""
    file.seek(piece.start)
    data = memoryview(file.read(len(piece)))
    nodes = [hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]
    nodes = nodes or [ZERO_SUBTREE[0]]
    for level in range(tree_depth(piece_length // BLOCK_BYTES)):
        if len(nodes) % 2:
            nodes.append(ZERO_SUBTREE[level])
        nodes = [hashlib.sha256(nodes[at] + nodes[at + 1]).digest() for at in range(0, len(nodes), 2)]
    return nodes[0]


def _parsed_ranges(pairs: object, length: int) -> Ranges:
    """Ranges from a note, none where it is damaged."""
    if not isinstance(pairs, list):
        return ()
    ranges = []
    for pair in pairs:
        match pair:
            case [int(start), int(stop)] if 0 <= start < stop <= length:
                ranges.append(range(start, stop))
            case _:
                return ()
    return merged(ranges)


def disk_bytes(folder: Path) -> int:
    """What a file, or the files in a folder, take on disk: holes take nothing."""
    return sum(map(_allocated, _files_in(folder) if folder.is_dir() else (folder,)))


def _files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if not path.is_symlink() and path.is_file())


def _allocated(path: Path) -> int:
    try:
        stat = path.stat()
    except OSError:
        return 0
    return int(getattr(stat, "st_blocks", -(-stat.st_size // 512)) * 512)

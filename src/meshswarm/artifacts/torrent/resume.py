"""What of a file was here when this peer last looked: notes beside the torrents, and how far to trust them.

The rule this file keeps: a note speaks for the very file it was made for. When the file's size, date or inode is
another, every piece that might be there is hashed again; what cannot be hashed counts as missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgpack

from meshswarm.artifacts.files import FileStamp, write_whole
from meshswarm.artifacts.merkle import check_piece_layer
from meshswarm.artifacts.torrent.checking import good_pieces, pieces_with_data, write_out
from meshswarm.artifacts.torrent.content import Content
from meshswarm.config import lock_file
from meshswarm.errors import ArtifactError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Note:
    """`have`: pieces that were on the disk, verified, when the file at `path` had this stamp."""

    path: str
    stamp: FileStamp
    have: frozenset[int]


def encode_note(content: Content, note: Note) -> bytes:
    bits = bytearray(-(-content.n_pieces // 8))
    for index in note.have:
        bits[index // 8] |= 0x80 >> index % 8
    fields = {
        "version": _VERSION,
        "length": content.length,
        "root": content.root,
        "path": note.path,
        "stamp": note.stamp.fields(),
        "have": bytes(bits),
    }
    return bytes(msgpack.packb(fields))


def decode_note(content: Content, data: bytes) -> Note | None:
    """None for what is damaged, or about another file."""
    try:
        fields: Any = msgpack.unpackb(data, strict_map_key=True)
        if (fields["version"], fields["length"], fields["root"]) != (_VERSION, content.length, content.root):
            return None
        bits, path = fields["have"], fields["path"]
        if type(bits) is not bytes or len(bits) != -(-content.n_pieces // 8) or type(path) is not str:
            return None
        have = frozenset(i for i in range(content.n_pieces) if bits[i // 8] & 0x80 >> i % 8)
        return Note(path, FileStamp.from_fields(fields["stamp"]), have)
    except (ValueError, KeyError, TypeError, IndexError, msgpack.UnpackException):
        return None


class Notes:
    """The notes of one folder: `<root>-<length>.note`, and `.layer` for the piece layer. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, content: Content) -> Note | None:
        data = self._read(self._path(content, "note"), content.n_pieces // 8 + 8192)
        return None if data is None else decode_note(content, data)

    def write(self, content: Content, path: Path, have: Iterable[int]) -> None:
        """Note that `have` is on the disk in `path`. Raises ArtifactError when the disk refuses."""
        write_out(path)
        note = Note(str(path), FileStamp.of(path), frozenset(have))
        write_whole(self._path(content, "note"), encode_note(content, note))

    def layer(self, content: Content) -> bytes | None:
        """The piece layer kept here, checked; None when there is none."""
        data = self._read(self._path(content, "layer"), content.layer_bytes)
        with contextlib.suppress(ArtifactError):
            if data is not None:
                check_piece_layer(content.length, content.root, content.piece_length, data)
                return data
        return None

    def keep_layer(self, content: Content, layer: bytes) -> None:
        path = self._path(content, "layer")
        if layer and not path.exists():
            write_whole(path, layer)

    def lock(self, content: Content) -> IO[str]:
        """Keep other processes from fetching this content into the same home; until it is closed.

        Raises ArtifactError when another does.
        """
        path = self._path(content, "lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
        except OSError as error:
            raise ArtifactError(f"{path} cannot be written: {error.strerror or error}") from error
        try:
            lock_file(file)
        except OSError:
            file.close()
            raise ArtifactError("another process of this home fetches this file now; wait until it is done") from None
        return file

    def forget(self, content: Content) -> None:
        for kind in ("note", "layer"):
            with contextlib.suppress(OSError):
                self._path(content, kind).unlink()

    def present(self, content: Content, path: Path, layer: bytes | None, claimed: frozenset[int]) -> frozenset[int]:
        """The pieces that are in `path`, whatever was `claimed`. Raises ArtifactError for what is no such file.

        Free where a note vouches for the file as it is; otherwise what was ever written is hashed.
        """
        check_place(path, content)
        if not path.exists():
            return frozenset()
        note = self.read(content)
        if note is None or note.path != str(path) or note.stamp != FileStamp.of(path):
            return good_pieces(path, content, layer, pieces_with_data(path, content))
        return note.have | good_pieces(path, content, layer, claimed - note.have)

    def _path(self, content: Content, kind: str) -> Path:
        return self._folder / f"{content.root.hex()}-{content.length}.{kind}"

    def _read(self, path: Path, at_most: int) -> bytes | None:
        try:
            with path.open("rb") as file:
                data = file.read(at_most + 1)
        except OSError:
            return None
        return data if len(data) <= at_most else None


def check_place(path: Path, content: Content) -> None:
    """Raises ArtifactError unless `path` is free, or a plain file no longer than the content."""
    if path.is_symlink():
        raise ArtifactError(f"{path} is a link: pieces are written to plain files only")
    if not path.exists():
        return
    if not path.is_file():
        raise ArtifactError(f"{path} is not a file")
    if (size := FileStamp.of(path).size) > content.length:
        raise ArtifactError(f"{path} is another file: it has {size} bytes, the model's has {content.length}")

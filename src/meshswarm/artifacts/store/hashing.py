"""Hashing a model's files once, for all that is ever needed of their trees: roots, header proofs, piece layers.

The rule this file keeps: a file is read once, from its first byte to its last, however much is wanted of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.artifacts.header_proof import HeaderProof, nodes_to_keep
from meshswarm.artifacts.merkle import Progress, hash_file, piece_layer_nodes
from meshswarm.artifacts.torrent.content import piece_length_of
from meshswarm.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class HashedModel:
    """A model's files, hashed. `message`: the proof with the header blocks. `layers`: each file's piece layer."""

    proof: HeaderProof
    message: bytes
    layers: tuple[bytes, ...]


def hash_model(paths: Sequence[Path], header: GgufHeader, progress: Progress | None = None) -> HashedModel:
    """Hash the files of the model whose checked header is `header`. Blocking, about 1 GB/s.

    Raises ArtifactError when a file cannot be read or changes its length meanwhile.
    """
    files, kept_headers, layers = [], [], []
    done = 0
    for path, part in zip(paths, header.files, strict=True):
        length, before = part.file_length, done
        layer_nodes = piece_layer_nodes(length, piece_length_of(length))
        wanted = nodes_to_keep(part.data_offset, length).union(layer_nodes)

        def report(done_of_file: int, _length: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done_of_file, header.file_length)

        root, kept = hash_file(path, wanted=wanted, progress=report)
        if path.stat().st_size != length:
            raise ArtifactError(f"{path} changed while it was being read; import it when it is complete")
        files.append((length, root))
        kept_headers.append((part.data_offset, kept))
        layers.append(b"".join(kept[node] for node in layer_nodes))
        done += length
    proof = HeaderProof.make(files, kept_headers)
    blocks = [_start_of(path, length) for path, length in zip(paths, proof.block_lengths, strict=True)]
    return HashedModel(proof, b"".join([proof.encode(), *blocks]), tuple(layers))


def _start_of(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(n_bytes)

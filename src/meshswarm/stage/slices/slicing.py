"""Cutting a span of layers out of a model file: a smaller GGUF that stock llama.cpp loads.

The rule this file keeps: bytes are copied, never interpreted, and the result depends on the model and the span alone,
so every peer that cuts the same span holds the same file. A slice carries no vocabulary text and no chat template. A
span in the middle also carries almost no embedding: 32 rows, which its injected hidden states overwrite; all of it only
in families that need the tokens beside the rows.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshswarm.artifacts.files import TEMPORARY_SUFFIX
from meshswarm.artifacts.gguf.check import check_hyperparameters
from meshswarm.artifacts.gguf.container import (
    F16,
    F32,
    I32,
    Q5_0,
    GgufHeader,
    Tensor,
    TensorType,
    tensor_bytes,
)
from meshswarm.artifacts.gguf.header_writer import HeaderWriter
from meshswarm.artifacts.merkle import file_root
from meshswarm.artifacts.ranges import Ranges, merged
from meshswarm.errors import ArtifactError
from meshswarm.span import MAX_LAYERS, Span
from meshswarm.stage.families.cuts import IllegalCutError, check_cut, slice_pads
from meshswarm.stage.families.proofs import Proofs
from meshswarm.stage.slices.copying import BLOCK_BYTES, copy_range
from meshswarm.stage.slices.metadata import Cut, write_metadata

SLICE_FORMAT = 3
"""Rises when the same span comes out as different bytes: older slices are cut again."""
MIDDLE_VOCABULARY = 32
"""Rows of the token embedding in a span that neither takes tokens nor gives logits."""
_FILLER_KEY = "meshswarm.filler"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of a slice. `source`: the model's file, and where in it the bytes lie; None means all zeros."""

    name: str
    dims: tuple[int, ...]
    type: TensorType
    n_bytes: int
    source: tuple[int, int] | None


_Plan = tuple[HeaderWriter, list[tuple[int, _Piece]]]
"""A slice's header, and its tensors with their offsets in the data section."""


def write_slice(
    source: Path | Sequence[Path],
    header: GgufHeader,
    span: Span,
    target: Path,
    *,
    proofs: Proofs | None = None,
    pads: tuple[int, ...] | None = None,
) -> None:
    """Write the layers `span` of the model in `source`, whose checked header is `header`, to `target`. `source`: its
    file, or all of them in order; of one that is there in part, the bytes that `slice_ranges` names must be.

    `pads`: the model's layers that the all-zero layers behind the real ones are shaped like (None: those that
    `slice_pads` names); they are holes in the file. `target` appears complete or not at all. Raises
    IllegalCutError for a cut that is not proved exact (on the builds of `proofs`; None: on the installed one),
    ArtifactError when reading or writing fails.
    """
    sources = (source,) if isinstance(source, Path) else tuple(source)
    _write(sources, span, target, _plan(header, span, proofs, pads), lambda _path: None)


def write_hashed_slice(
    sources: Sequence[Path], header: GgufHeader, span: Span, target: Path, *, proofs: Proofs | None = None
) -> bytes:
    """`write_slice`, and the BitTorrent v2 root of what was written, hashed while the disk takes it."""
    return _write(sources, span, target, _plan(header, span, proofs, None), file_root)


def _write(sources: Sequence[Path], span: Span, target: Path, plan: _Plan, beside: Callable[[Path], T]) -> T:
    try:
        return _write_file(sources, target, *plan, beside)
    except OSError as error:
        raise ArtifactError(
            f"the layers {span} of {sources[0]} cannot be cut into {target}: {error.strerror or error}"
        ) from error


def slice_ranges(header: GgufHeader, span: Span, *, proofs: Proofs | None = None) -> tuple[Ranges, ...]:
    """The bytes of each of the model's files that `write_slice` would read. Raises IllegalCutError as it does."""
    _, placed = _plan(header, span, proofs, None)
    ranges: list[list[range]] = [[] for _ in header.files]
    for _, piece in placed:
        if piece.source is not None:
            file, start = piece.source
            ranges[file].append(range(start, start + piece.n_bytes))
    return tuple(map(merged, ranges))


def slice_bytes(header: GgufHeader, span: Span, *, proofs: Proofs | None = None) -> int:
    """Bytes of the tensors in a slice that `write_slice` would write, zero layers included; nothing is written.

    Raises IllegalCutError as it does.
    """
    writer, _ = _plan(header, span, proofs, None)
    return writer.data_bytes


def slice_file_bytes(header: GgufHeader, span: Span, *, proofs: Proofs | None = None) -> int:
    """Length of the file that `write_slice` would write, zero layers included. Raises IllegalCutError as it does."""
    writer, placed = _plan(header, span, proofs, None)
    return len(_head(writer, placed)) + writer.data_bytes


def zero_layer_bytes(header: GgufHeader, layer: int) -> int:
    """Bytes of a zero layer that is shaped like the model's `layer`."""
    writer = HeaderWriter(header.alignment)
    for piece in _zero_layer(header, layer, layer):
        writer.tensor(piece.name, piece.dims, piece.type)
    return writer.data_bytes


def _plan(header: GgufHeader, span: Span, proofs: Proofs | None, pads: tuple[int, ...] | None) -> _Plan:
    """The slice's header, and its tensors with their offsets in the data section."""
    shape = check_hyperparameters(header)
    family = check_cut(header, span, proofs)
    if family is None:
        raise IllegalCutError(f"the layers {span} are the whole model: its file is used as it is")
    layers = (*range(span.start, span.stop), *(slice_pads(header, span) if pads is None else pads))
    if len(layers) > MAX_LAYERS:
        raise IllegalCutError(f"{len(layers) - len(span)} padding layers are too many beside the layers {span}")
    is_middle = span.start > 0 and span.stop < shape.n_layers
    needs_vocabulary = not is_middle or family.needs_tokens
    n_vocab = shape.n_vocab if needs_vocabulary else min(MIDDLE_VOCABULARY, shape.n_vocab)
    cut = Cut(header, family, span, layers, shape.n_layers, n_vocab)
    writer = HeaderWriter(header.alignment)
    write_metadata(writer, cut)
    return writer, [(writer.tensor(piece.name, piece.dims, piece.type), piece) for piece in _pieces(cut)]


def _pieces(cut: Cut) -> list[_Piece]:
    """The slice's tensors, in the order of the model's file, zero layers at the end."""
    header, family, span = cut.header, cut.family, cut.span
    shared = family.shared_tensors | family.factors_by_context
    pieces = []
    for tensor in header.tensors.values():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        if match is not None:
            if int(match[1]) in span:
                pieces.append(_copied(header, tensor, f"blk.{int(match[1]) - span.start}.{match[2]}"))
        elif tensor.name == "token_embd.weight":
            pieces.append(_embedding(cut, tensor))
        elif tensor.name == "output.weight":
            if cut.is_last:
                pieces.append(_copied(header, tensor, tensor.name))
            elif family.needs_output:
                pieces.append(_zeros(tensor.name, (tensor.dims[0], cut.n_vocab)))
        elif tensor.name in shared or (tensor.name in family.last_tensors and cut.is_last):
            pieces.append(_copied(header, tensor, tensor.name))
    for at, layer in enumerate(cut.layers[len(span) :], start=len(span)):
        pieces += _zero_layer(header, layer, at)
    return pieces


def _zero_layer(header: GgufHeader, layer: int, at: int) -> list[_Piece]:
    """Tensors of zeros for the slice's layer `at`, shaped like the model's `layer`."""
    prefix = f"blk.{layer}."
    return [
        _zeros(f"blk.{at}.{tensor.name.removeprefix(prefix)}", tensor.dims, tensor.type)
        for tensor in header.tensors.values()
        if tensor.name.startswith(prefix)
    ]


def _copied(header: GgufHeader, tensor: Tensor, name: str) -> _Piece:
    return _Piece(name, tensor.dims, tensor.type, tensor.n_bytes, (tensor.file, header.position(tensor)))


def _embedding(cut: Cut, tensor: Tensor) -> _Piece:
    """The token embedding's first `n_vocab` rows; zeros where only its shape matters."""
    dims = (tensor.dims[0], cut.n_vocab)
    serves_as_output = cut.is_last and "output.weight" not in cut.header.tensors
    if not (cut.is_first or serves_as_output) and cut.n_vocab > MIDDLE_VOCABULARY:
        return _zeros(tensor.name, dims)
    n_bytes = tensor.n_bytes // tensor.dims[1] * cut.n_vocab
    return _Piece(tensor.name, dims, tensor.type, n_bytes, (tensor.file, cut.header.position(tensor)))


def _zeros(name: str, dims: tuple[int, ...], like: TensorType = Q5_0) -> _Piece:
    """A tensor of zeros, in a cheap encoding that no CPU back-end copies into memory of its own to repack it.

    Not in place of `like` where that is float32, which some operations take alone, or a table of integers.
    """
    if len(dims) == 1 or like in (F32, I32):
        zero_type = like if like is I32 else F32
    else:
        zero_type = F16 if dims[0] % Q5_0.block_elements else Q5_0
    return _Piece(name, dims, zero_type, tensor_bytes(dims, zero_type), None)


def _write_file(
    sources: Sequence[Path],
    target: Path,
    writer: HeaderWriter,
    placed: list[tuple[int, _Piece]],
    beside: Callable[[Path], T],
) -> T:
    """Write header and tensors to a temporary file, then give it the name `target`. `beside` is called with what was
    written, while the disk takes it; returns what that returns."""
    target.parent.mkdir(parents=True, exist_ok=True)
    head = _head(writer, placed)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=TEMPORARY_SUFFIX)
    try:
        with ExitStack() as opened:
            out = opened.enter_context(os.fdopen(descriptor, "wb", buffering=0))
            models = [opened.enter_context(path.open("rb", buffering=0)) for path in sources]
            out.write(head)
            out.truncate(len(head) + writer.data_bytes)
            for copy in _copies(placed, len(head)):
                copy_range(models[copy.file], copy.start, out, copy.position, copy.n_bytes)
            with ThreadPoolExecutor(1) as pool:
                synced = pool.submit(os.fsync, out.fileno())
                result = beside(Path(temporary))
                synced.result()
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return result


def _head(writer: HeaderWriter, placed: list[tuple[int, _Piece]]) -> bytes:
    """The slice's header, made as long as it takes for its largest stretch of copied bytes to lie in blocks as it does
    in the model's file: a file system that can lets both files share those blocks."""
    largest = max(_copies(placed, 0), key=lambda copy: copy.n_bytes)
    return writer.finish_at(_FILLER_KEY, largest.start - largest.position, BLOCK_BYTES)


class _Copy(NamedTuple):
    """`n_bytes` of a model's file from `start` on, which go to `position` in the slice."""

    file: int
    start: int
    position: int
    n_bytes: int

    def is_followed_by(self, file: int, start: int, position: int) -> bool:
        return (file, start, position) == (self.file, self.start + self.n_bytes, self.position + self.n_bytes)


def _copies(placed: list[tuple[int, _Piece]], data_offset: int) -> list[_Copy]:
    """What is copied for all pieces: neighbours that stay neighbours in one go. Padding between tensors is none of a
    model's numbers: it is zeros in every slice."""
    copies: list[_Copy] = []
    for offset, piece in placed:
        if piece.source is None:
            continue
        file, start = piece.source
        position = data_offset + offset
        last = copies[-1] if copies else None
        if last is not None and last.is_followed_by(file, start, position):
            copies[-1] = last._replace(n_bytes=last.n_bytes + piece.n_bytes)
        else:
            copies.append(_Copy(file, start, position, piece.n_bytes))
    return copies

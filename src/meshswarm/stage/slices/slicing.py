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
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshswarm.artifacts.container import F16, F32, I32, Q5_0, GgufHeader, Tensor, TensorType, tensor_bytes
from meshswarm.artifacts.gguf import check_hyperparameters
from meshswarm.artifacts.header_writer import HeaderWriter
from meshswarm.errors import ArtifactError
from meshswarm.span import MAX_LAYERS, Span
from meshswarm.stage.families.cuts import IllegalCutError, check_cut, slice_pads
from meshswarm.stage.families.proofs import Proofs
from meshswarm.stage.slices.metadata import Cut, write_metadata

SLICE_FORMAT = 2
"""Rises when the same span comes out as different bytes: older slices are cut again."""
MIDDLE_VOCABULARY = 32
"""Rows of the token embedding in a span that neither takes tokens nor gives logits."""
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of a slice. `source` is where its bytes lie in the model file; None means all zeros."""

    name: str
    dims: tuple[int, ...]
    type: TensorType
    n_bytes: int
    source: int | None


def write_slice(
    source: Path,
    header: GgufHeader,
    span: Span,
    target: Path,
    *,
    proofs: Proofs | None = None,
    pads: tuple[int, ...] | None = None,
) -> None:
    """Write the layers `span` of the model in `source`, whose checked header is `header`, to `target`.

    `pads`: the model's layers that the all-zero layers behind the real ones are shaped like (None: those that
    `slice_pads` names); they are holes in the file. `target` appears complete or not at all. Raises IllegalCutError for
    a cut that is not proved exact (on the builds of `proofs`; None: on the installed one), ArtifactError when reading
    or writing fails.
    """
    writer, placed = _plan(header, span, proofs, pads)
    try:
        _write_file(source, target, writer, placed)
    except OSError as error:
        raise ArtifactError(
            f"the layers {span} of {source} cannot be cut into {target}: {error.strerror or error}"
        ) from error


def slice_bytes(header: GgufHeader, span: Span, *, proofs: Proofs | None = None) -> int:
    """Bytes of the tensors in a slice that `write_slice` would write, zero layers included; nothing is written.

    Raises IllegalCutError as it does.
    """
    writer, _ = _plan(header, span, proofs, None)
    return writer.data_bytes


def zero_layer_bytes(header: GgufHeader, layer: int) -> int:
    """Bytes of a zero layer that is shaped like the model's `layer`."""
    writer = HeaderWriter(header.alignment)
    for piece in _zero_layer(header, layer, layer):
        writer.tensor(piece.name, piece.dims, piece.type)
    return writer.data_bytes


def _plan(
    header: GgufHeader, span: Span, proofs: Proofs | None, pads: tuple[int, ...] | None
) -> tuple[HeaderWriter, list[tuple[int, _Piece]]]:
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
    return _Piece(name, tensor.dims, tensor.type, tensor.n_bytes, header.data_offset + tensor.offset)


def _embedding(cut: Cut, tensor: Tensor) -> _Piece:
    """The token embedding's first `n_vocab` rows; zeros where only its shape matters."""
    dims = (tensor.dims[0], cut.n_vocab)
    serves_as_output = cut.is_last and "output.weight" not in cut.header.tensors
    if not (cut.is_first or serves_as_output) and cut.n_vocab > MIDDLE_VOCABULARY:
        return _zeros(tensor.name, dims)
    n_bytes = tensor.n_bytes // tensor.dims[1] * cut.n_vocab
    return _Piece(tensor.name, dims, tensor.type, n_bytes, cut.header.data_offset + tensor.offset)


def _zeros(name: str, dims: tuple[int, ...], like: TensorType = Q5_0) -> _Piece:
    """A tensor of zeros, in a cheap encoding that no CPU back-end copies into memory of its own to repack it.

    Not in place of `like` where that is float32, which some operations take alone, or a table of integers.
    """
    if len(dims) == 1 or like in (F32, I32):
        zero_type = like if like is I32 else F32
    else:
        zero_type = F16 if dims[0] % Q5_0.block_elements else Q5_0
    return _Piece(name, dims, zero_type, tensor_bytes(dims, zero_type), None)


def _write_file(source: Path, target: Path, writer: HeaderWriter, placed: list[tuple[int, _Piece]]) -> None:
    """Write header and tensors to a temporary file, then give it the name `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    head = writer.finish()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as out, source.open("rb", buffering=0) as model:
            out.write(head)
            out.truncate(len(head) + writer.data_bytes)
            for offset, piece in placed:
                if piece.source is not None:
                    _copy_range(model, piece.source, out, len(head) + offset, piece.n_bytes)
            os.fsync(out.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _copy_range(model: IO[bytes], source: int, out: IO[bytes], position: int, n_bytes: int) -> None:
    """Copy bytes between files, inside the kernel where it can."""
    model.seek(source)
    out.seek(position)
    left = n_bytes
    while left:
        copied = _copy_in_kernel(model, out, left) or _copy_through_buffer(model, out, left)
        if not copied:
            raise OSError(f"the model file ends {left} bytes too early")
        left -= copied


def _copy_in_kernel(model: IO[bytes], out: IO[bytes], n_bytes: int) -> int:
    """Bytes copied by the kernel from one position to the other, both moved on; 0 where it cannot."""
    copy_file_range = getattr(os, "copy_file_range", None)  # Linux only
    if copy_file_range is None:
        return 0
    try:
        return int(copy_file_range(model.fileno(), out.fileno(), n_bytes))
    except OSError:  # not between these file systems: the copy by hand says so if it is anything else
        return 0


def _copy_through_buffer(model: IO[bytes], out: IO[bytes], n_bytes: int) -> int:
    piece = model.read(min(n_bytes, _COPY_BYTES))
    written = out.write(piece)
    if written < len(piece):
        model.seek(written - len(piece), os.SEEK_CUR)
    return written

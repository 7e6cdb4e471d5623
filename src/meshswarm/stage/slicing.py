"""Cutting a span of layers out of a model file: a smaller GGUF that stock llama.cpp loads.

The rule this file keeps: bytes are copied, never interpreted, and the result depends on the model and the span alone,
so every peer that cuts the same span holds the same file. A slice carries no vocabulary text and no chat template. A
span in the middle also carries almost no embedding: 32 rows, which its injected hidden states overwrite.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshswarm.artifacts.container import F16, F32, Q5_0, Entry, GgufHeader, Tensor, TensorType, tensor_bytes
from meshswarm.artifacts.gguf import check_hyperparameters
from meshswarm.artifacts.header_writer import HeaderWriter
from meshswarm.errors import ArtifactError
from meshswarm.span import MAX_LAYERS, Span
from meshswarm.stage.families import Family, IllegalCutError, check_cut

SLICE_FORMAT = 1
"""Rises when the same span comes out as different bytes: older slices are cut again."""
MIDDLE_VOCABULARY = 32
"""Rows of the token embedding in a span that neither takes tokens nor gives logits."""
_COPY_BYTES = 1 << 20
_KEPT_GENERAL_KEYS = frozenset(
    {"general.architecture", "general.alignment", "general.file_type", "general.quantization_version"}
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of a slice. `source` is where its bytes lie in the model file; None means all zeros."""

    name: str
    dims: tuple[int, ...]
    type: TensorType
    n_bytes: int
    source: int | None


def write_slice(source: Path, header: GgufHeader, span: Span, target: Path, *, pad_layers: int = 0) -> None:
    """Write the layers `span` of the model in `source`, whose checked header is `header`, to `target`.

    `pad_layers` appends that many all-zero layers, shaped like the last real one: never computed by a span that stops
    at its last real layer, an identity otherwise. They are holes in the file. `target` appears complete or not at all.
    Raises IllegalCutError for a cut that is not proved exact, ArtifactError when reading or writing fails.
    """
    writer, placed = _plan(header, span, pad_layers)
    try:
        _write_file(source, target, writer, placed)
    except OSError as error:
        raise ArtifactError(
            f"the layers {span} of {source} cannot be cut into {target}: {error.strerror or error}"
        ) from error


def _plan(header: GgufHeader, span: Span, pad_layers: int) -> tuple[HeaderWriter, list[tuple[int, _Piece]]]:
    """The slice's header, and its tensors with their offsets in the data section."""
    shape = check_hyperparameters(header)
    family = check_cut(shape.architecture, shape.n_layers, span)
    if family is None:
        raise IllegalCutError(f"the layers {span} are the whole model: its file is used as it is")
    if len(span) + pad_layers > MAX_LAYERS:
        raise IllegalCutError(f"{pad_layers} padding layers are too many beside the layers {span}")
    is_last = span.stop == shape.n_layers
    is_middle = span.start > 0 and not is_last
    n_vocab = min(MIDDLE_VOCABULARY, shape.n_vocab) if is_middle else shape.n_vocab
    writer = HeaderWriter(header.alignment)
    _write_metadata(writer, header, family, span, pad_layers, n_vocab)
    pieces = _pieces(header, family, span, pad_layers, n_vocab, is_last=is_last)
    return writer, [(writer.tensor(piece.name, piece.dims, piece.type), piece) for piece in pieces]


def _write_metadata(
    writer: HeaderWriter, header: GgufHeader, family: Family, span: Span, pad_layers: int, n_vocab: int
) -> None:
    prefix = family.architecture + "."
    replaced = {prefix + "block_count": len(span) + pad_layers, prefix + "vocab_size": n_vocab}
    for key, entry in header.metadata.items():
        if key in replaced:
            continue
        if key in _KEPT_GENERAL_KEYS:
            writer.copy(header, entry)
        elif key.startswith(prefix):
            _copy_hyperparameter(writer, header, entry, family, span, pad_layers)
    for key, value in replaced.items():
        writer.u32(key, value)
    writer.text("tokenizer.ggml.model", "no_vocab")


def _copy_hyperparameter(
    writer: HeaderWriter, header: GgufHeader, entry: Entry, family: Family, span: Span, pad_layers: int
) -> None:
    name = entry.key.removeprefix(family.architecture + ".")
    if entry.is_array and name in family.uniform_keys:
        values = header.numbers(entry.key)
        if values is None or (values != values[0]).any():
            raise IllegalCutError(f"{header.source} cannot be split: its setting {entry.key} differs between layers")
        writer.copy_items(header, entry, span.start, span.stop + pad_layers)
    elif name not in family.uniform_keys | family.common_keys:
        raise IllegalCutError(
            f"{header.source} cannot be split: no test has proved what its setting {entry.key} means to a part of it"
        )
    elif name in family.proved_texts and header.text(entry.key) not in family.proved_texts[name]:
        raise IllegalCutError(
            f"{header.source} cannot be split: no test has proved what {header.text(entry.key)!r} as its setting "
            f"{entry.key} means to a part of it"
        )
    else:
        writer.copy(header, entry)


def _pieces(
    header: GgufHeader, family: Family, span: Span, pad_layers: int, n_vocab: int, *, is_last: bool
) -> list[_Piece]:
    """The slice's tensors, in the order of the model's file, padding layers at the end."""
    pieces = []
    for tensor in header.tensors.values():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        if match is not None:
            if int(match[1]) in span:
                pieces.append(_copied(header, tensor, f"blk.{int(match[1]) - span.start}.{match[2]}"))
        elif tensor.name == "token_embd.weight":
            pieces.append(_embedding(header, tensor, n_vocab, is_needed=span.start == 0 or _is_tied(header)))
        elif tensor.name == "output.weight":
            if is_last:
                pieces.append(_copied(header, tensor, tensor.name))
        elif tensor.name in family.shared_tensors:
            pieces.append(_copied(header, tensor, tensor.name))
        else:
            raise IllegalCutError(
                f"{header.source} cannot be split: no test has proved which spans need its tensor {tensor.name}"
            )
    last_prefix = f"blk.{span.stop - 1}."
    for pad in range(pad_layers):
        for tensor in header.tensors.values():
            if tensor.name.startswith(last_prefix):
                name = f"blk.{len(span) + pad}.{tensor.name.removeprefix(last_prefix)}"
                pieces.append(_zeros(name, tensor.dims))
    return pieces


def _is_tied(header: GgufHeader) -> bool:
    return "output.weight" not in header.tensors


def _copied(header: GgufHeader, tensor: Tensor, name: str) -> _Piece:
    return _Piece(name, tensor.dims, tensor.type, tensor.n_bytes, header.data_offset + tensor.offset)


def _embedding(header: GgufHeader, tensor: Tensor, n_vocab: int, *, is_needed: bool) -> _Piece:
    """The token embedding's first `n_vocab` rows; zeros where only its shape matters."""
    dims = (tensor.dims[0], n_vocab)
    if not is_needed and n_vocab > MIDDLE_VOCABULARY:
        return _zeros(tensor.name, dims)
    n_bytes = tensor.n_bytes // tensor.dims[1] * n_vocab
    return _Piece(tensor.name, dims, tensor.type, n_bytes, header.data_offset + tensor.offset)


def _zeros(name: str, dims: tuple[int, ...]) -> _Piece:
    """A tensor of zeros in a cheap encoding that no CPU back-end copies into memory of its own to repack it."""
    if len(dims) == 1:
        zero_type = F32
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

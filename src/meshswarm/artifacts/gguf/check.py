"""Reading a model file's header strictly: the door every GGUF passes before any C++ sees it.

The rule this file keeps: nobody gets a `GgufHeader` that was not checked in full: the container (`container`), the
hyper-parameters (`hyperparameters`), and, for files that carry one and are to be used, the tokenizer (`tokenizer`,
which is slower and therefore a call of its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshswarm.artifacts.gguf.container import (
    MAX_HEADER_BYTES,
    Entry,
    GgufHeader,
    HeaderCutShortError,
    Tensor,
    TensorType,
    ValueType,
    parse_container,
)
from meshswarm.artifacts.gguf.hyperparameters import Hyperparameters, check_hyperparameters
from meshswarm.artifacts.gguf.split import join_parts
from meshswarm.artifacts.gguf.tokenizer import check_tokenizer
from meshswarm.errors import ArtifactError

__all__ = [
    "MAX_HEADER_BYTES",
    "Entry",
    "GgufHeader",
    "Hyperparameters",
    "Tensor",
    "TensorType",
    "ValueType",
    "check_hyperparameters",
    "check_tokenizer",
    "parse_header",
    "parse_headers",
    "read_header",
    "read_headers",
]

_FIRST_READ_BYTES = 4 << 20


def parse_header(data: bytes | memoryview, file_length: int, *, source: str = "the model file") -> GgufHeader:
    """The checked header of a file of `file_length` bytes that starts with `data`; `source` names it in errors.

    Raises ArtifactError, naming the field, for anything malformed, out of range or unknown.
    """
    header = parse_container(data, file_length, source)
    check_hyperparameters(header)
    return header


def parse_headers(starts: Sequence[bytes], file_lengths: Sequence[int], *, source: str) -> GgufHeader:
    """The checked header of a model in several files, each of which starts with one of `starts`; or in one.

    Raises ArtifactError as `parse_header` does, and when the files are not the parts of one model.
    """
    if len(starts) == 1:
        return parse_header(starts[0], file_lengths[0], source=source)
    parts = [
        parse_container(start, length, f"part {number} of {source}", min_tensors=0)
        for number, (start, length) in enumerate(zip(starts, file_lengths, strict=True), start=1)
    ]
    return _joined(parts)


def read_header(path: Path) -> GgufHeader:
    """The checked header of the file in `path`, reading no more of it than that takes (64 MiB at most).

    Raises ArtifactError, naming the field, for anything malformed, out of range or unknown.
    """
    header = _read_container(path, min_tensors=1)
    check_hyperparameters(header)
    return header


def read_headers(paths: Sequence[Path]) -> GgufHeader:
    """The checked header of the model in the files of `paths`, in order.

    Raises ArtifactError as `read_header` does, and when the files are not the parts of one model.
    """
    if len(paths) == 1:
        return read_header(paths[0])
    return _joined([_read_container(path, min_tensors=0) for path in paths])


def _joined(parts: Sequence[GgufHeader]) -> GgufHeader:
    n_bytes = sum(part.data_offset for part in parts)
    if n_bytes > MAX_HEADER_BYTES:
        raise parts[0].fault("the header", f"is longer than {MAX_HEADER_BYTES >> 20} MiB in all parts together")
    header = join_parts(parts)
    check_hyperparameters(header)
    return header


def _read_container(path: Path, *, min_tensors: int) -> GgufHeader:
    try:
        with path.open("rb") as file:
            file_length = path.stat().st_size
            data = bytearray()
            while True:
                data += file.read(max(len(data), _FIRST_READ_BYTES))
                try:
                    return parse_container(bytes(data), file_length, str(path), min_tensors=min_tensors)
                except HeaderCutShortError:
                    if len(data) >= min(file_length, MAX_HEADER_BYTES):
                        raise
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error

"""Reading a model file's header strictly: the door every GGUF passes before any C++ sees it.

The rule this file keeps: nobody gets a `GgufHeader` that was not checked in full: the container (`container`), the
hyper-parameters (`hyperparameters`), and, for files that carry one and are to be used, the tokenizer (`tokenizer`,
which is slower and therefore a call of its own).
"""

from __future__ import annotations

from pathlib import Path

from meshswarm.artifacts.container import (
    MAX_HEADER_BYTES,
    Entry,
    GgufHeader,
    HeaderCutShortError,
    Tensor,
    TensorType,
    ValueType,
    parse_container,
)
from meshswarm.artifacts.hyperparameters import Hyperparameters, check_hyperparameters
from meshswarm.artifacts.tokenizer import check_tokenizer
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
    "read_header",
]

_FIRST_READ_BYTES = 4 << 20


def parse_header(data: bytes | memoryview, file_length: int, *, source: str = "the model file") -> GgufHeader:
    """The checked header of a file of `file_length` bytes that starts with `data`; `source` names it in errors.

    Raises ArtifactError, naming the field, for anything malformed, out of range or unknown.
    """
    header = parse_container(data, file_length, source)
    check_hyperparameters(header)
    return header


def read_header(path: Path) -> GgufHeader:
    """The checked header of the file in `path`, reading no more of it than that takes (64 MiB at most).

    Raises ArtifactError, naming the field, for anything malformed, out of range or unknown.
    """
    try:
        with path.open("rb") as file:
            file_length = path.stat().st_size
            data = bytearray()
            while True:
                data += file.read(max(len(data), _FIRST_READ_BYTES))
                try:
                    return parse_header(bytes(data), file_length, source=str(path))
                except HeaderCutShortError:
                    if len(data) >= min(file_length, MAX_HEADER_BYTES):
                        raise
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error

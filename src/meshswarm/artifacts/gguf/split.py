"""Models split into several files, NAME-00001-of-00003.gguf and so on, as gguf-split and llama.cpp write and read them.

The rule this file keeps: the parts of a model are taken together or not at all. What they say of themselves (which
part, of how many, how many tensors in all) must agree with their order, their number and what they hold.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from meshswarm.artifacts.files import TEMPORARY_SUFFIX
from meshswarm.artifacts.gguf.container import GgufHeader, Tensor, ValueType
from meshswarm.errors import ArtifactError

MAX_PARTS = 512
NUMBER_KEY, COUNT_KEY, TENSORS_KEY = "split.no", "split.count", "split.tensors.count"
_KINDS = {NUMBER_KEY: ValueType.UINT16, COUNT_KEY: ValueType.UINT16, TENSORS_KEY: ValueType.INT32}
"""What llama.cpp reads these as, and nothing else."""
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_name(stem: str, index: int, n_parts: int) -> str:
    """The name of a model's part `index`, counted from 0, that llama.cpp looks for."""
    return f"{stem}-{index + 1:05d}-of-{n_parts:05d}.gguf"


def model_stem(path: Path) -> str:
    """The file's name without its ending, and without which part of a model it is."""
    match = _PART_NAME.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


def part_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model that the file in `path` is, or is a part of, in order, by its name.

    Raises ArtifactError when a part is missing, or the name cannot be a part's.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ArtifactError(f"{path.name} is part {number} of {count}: that cannot be")
    if count > MAX_PARTS:
        raise ArtifactError(f"{path.name} is one of {count} parts, more than {MAX_PARTS}")
    paths = tuple(path.with_name(part_name(match["stem"], index, count)) for index in range(count))
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ArtifactError(f"{path.parent} does not hold all {count} parts of the model: no {missing[0]}{more}")
    return paths


def are_named_as_parts(paths: Sequence[Path]) -> bool:
    """True when llama.cpp finds all of `paths` by the first one's name."""
    first = paths[0]
    stem = model_stem(first)
    return all(path == first.with_name(part_name(stem, index, len(paths))) for index, path in enumerate(paths))


def link_as_parts(paths: Sequence[Path], folder: Path) -> Path:
    """The first of links to `paths` in `folder`, named so that llama.cpp finds the others. Raises ArtifactError."""
    links = [folder / part_name("model", index, len(paths)) for index in range(len(paths))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for link, path in zip(links, paths, strict=True):
            if not link.exists() or not link.samefile(path):
                _link(path, link)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be written: {error.strerror or error}") from error
    return links[0]


def _link(path: Path, link: Path) -> None:
    """Make `link` lead to `path`, whatever it was before."""
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        new.symlink_to(path)
    except OSError:  # Windows lets only some accounts make them
        os.link(path, new)
    new.replace(link)


def says_it_is_a_part(header: GgufHeader) -> bool:
    """True for a file that holds a part of a model only, by its own word."""
    n_parts = header.scalar(COUNT_KEY)
    return isinstance(n_parts, int) and n_parts > 1


def join_parts(parts: Sequence[GgufHeader]) -> GgufHeader:
    """The header of the model in these files: the first one's, with the tensors of all. Raises ArtifactError."""
    if len(parts) == 1:
        return parts[0]
    tensors: dict[str, Tensor] = {}
    for index, part in enumerate(parts):
        _check_number(part, NUMBER_KEY, index)
        _check_number(part, COUNT_KEY, len(parts))
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                raise part.fault(f"tensor {tensor.name}", "is in another part already")
            tensors[tensor.name] = tensor._replace(file=index)
    for part in parts:
        _check_number(part, TENSORS_KEY, len(tensors))
    if not tensors:
        raise parts[0].fault("the tensor count", "is 0 in all of its parts")
    length = sum(part.file_length for part in parts)
    return replace(parts[0], file_length=length, tensors=MappingProxyType(tensors), parts=tuple(parts))


def _check_number(part: GgufHeader, key: str, expected: int) -> None:
    entry = part.metadata.get(key)
    if entry is None:
        raise part.fault(key, "is missing: its name says that it is a part of a model")
    if entry.is_array or entry.type is not _KINDS[key]:
        raise part.fault(key, f"is not stored as {_KINDS[key].name.lower()}")
    value = part.scalar(key)
    if value != expected:
        raise part.fault(key, f"is {value} where {expected} is right: these files are not one model's parts")

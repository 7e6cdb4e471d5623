"""Proved headers on disk, of models stored here and of models only known of.

The rule this file keeps: a header is handed out only as the bytes that were proved against its model id, whoever wrote
the file that they come from.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from meshswarm.artifacts.files import write_whole
from meshswarm.artifacts.gguf.check import GgufHeader, parse_headers
from meshswarm.artifacts.header_proof import MAX_MESSAGE_BYTES, HeaderProof, verify_message
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.errors import ArtifactError

_SUFFIX = ".proof"
MAX_IN_MEMORY_BYTES = 256 << 20
"""Of headers that were read; those used least lately are read again. The newest stays, whatever its size."""


class Headers:
    """The proof messages in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._proved: OrderedDict[bytes, tuple[HeaderProof, GgufHeader]] = OrderedDict()
        self._guard = threading.Lock()

    def has(self, model_id: bytes) -> bool:
        return self._path(model_id).is_file()

    def get(self, model_id: bytes) -> tuple[HeaderProof, GgufHeader]:
        """The proof, and the checked header. Raises ArtifactError when they are not here, or damaged: then they are
        not here any more, so that they are got anew."""
        with self._guard:
            known = self._proved.get(model_id)
            if known is not None:
                self._proved.move_to_end(model_id)
        if known is not None:
            return known
        message = self.message(model_id)
        try:
            proved = read_message(message, model_id)
        except ArtifactError:
            self.drop(model_id)
            raise
        self._remember(*proved)
        return proved

    def keep(self, message: bytes, proof: HeaderProof, header: GgufHeader) -> None:
        """Write down a message and what `read_message` made of it. Raises ArtifactError when the disk refuses."""
        write_whole(self._path(proof.model_id), message)
        self._remember(proof, header)

    def message(self, model_id: bytes) -> bytes:
        """The message as it is on disk. Raises ArtifactError when there is none."""
        try:
            with self._path(model_id).open("rb") as file:
                return file.read(MAX_MESSAGE_BYTES + 1)
        except OSError as error:
            raise ArtifactError(
                f"the header of model {model_id_text(model_id)} is not here: {error.strerror or error}"
            ) from error

    def drop(self, model_id: bytes) -> None:
        self._path(model_id).unlink(missing_ok=True)
        with self._guard:
            self._proved.pop(model_id, None)

    def _remember(self, proof: HeaderProof, header: GgufHeader) -> None:
        with self._guard:
            self._proved[proof.model_id] = (proof, header)
            self._proved.move_to_end(proof.model_id)
            n_bytes = sum(each.blocks_length for each, _ in self._proved.values())
            while n_bytes > MAX_IN_MEMORY_BYTES and len(self._proved) > 1:
                _, (oldest, _) = self._proved.popitem(last=False)
                n_bytes -= oldest.blocks_length

    def _path(self, model_id: bytes) -> Path:
        return self._folder / f"{model_id_text(model_id)}{_SUFFIX}"


def read_message(message: bytes, model_id: bytes) -> tuple[HeaderProof, GgufHeader]:
    """Proof and checked header of a message. Only proved bytes are parsed. Raises ArtifactError."""
    proof, raws = verify_message(message, model_id)
    lengths = [length for length, _root in proof.files]
    header = parse_headers(raws, lengths, source=f"the header of model {model_id_text(model_id)[:12]}")
    for file, one in zip(header.files, proof.proofs, strict=True):
        if file.data_offset != one.header_length:
            raise file.fault("its length", f"is {file.data_offset} bytes, not {one.header_length} as was said")
    return proof, header

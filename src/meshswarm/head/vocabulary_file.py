"""A model's vocabulary as a file of its own: what llama.cpp's tokenizer needs from a header, and no tensors.

The rule this file keeps: only entries on the list go in, copied byte for byte from a checked header, and the file
stands under its final name only after a child process has loaded it and tokenised with it. A head needs no more of a
model than this, and a header alone is refused by the loader, whose tensors would be missing.
"""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

from meshswarm.artifacts.files import TEMPORARY_SUFFIX, sweep_temporaries, write_whole
from meshswarm.artifacts.gguf.check import GgufHeader, check_tokenizer
from meshswarm.artifacts.gguf.header_writer import HeaderWriter
from meshswarm.artifacts.gguf.probe import engine_build, probe
from meshswarm.artifacts.gguf.tokenizer import MODEL_KEY, NO_VOCABULARY

_ENTRIES = frozenset(
    {
        "general.architecture",  # the loader wants to know it before anything else
        "general.name",  # llama.cpp goes by it for spaces after Phi-3's special tokens
        *(
            f"tokenizer.ggml.{name}"
            for name in (
                "model",
                "pre",
                "tokens",
                "token_type",
                "token_type_count",
                "scores",
                "merges",
                "add_bos_token",
                "add_eos_token",
                "add_sep_token",
                "add_space_prefix",
                "remove_extra_whitespaces",
                "suppress_tokens",
                *(
                    f"{role}_token_id"
                    for role in ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask")
                ),
                *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
            )
        ),
    }
)


def vocabulary_file(header: GgufHeader, folder: Path) -> Path:
    """A file in `folder` with the vocabulary of `header` that llama.cpp loads. Blocking: the first time, it tries the
    file in a child process.

    Raises ArtifactError when the header has no vocabulary, or one that llama.cpp cannot be trusted with.
    """
    content = _content(header)
    mark = hashlib.sha256(engine_build().encode() + content).hexdigest()[:32]
    path = folder / f"vocabulary-{mark}.gguf"
    if path.is_file() and path.read_bytes() == content:
        return path
    check_tokenizer(header)
    if header.text(MODEL_KEY) in NO_VOCABULARY:
        raise header.fault(MODEL_KEY, "says that there is no vocabulary")
    sweep_temporaries(folder)
    untried = folder / f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        write_whole(untried, content)
        probe(untried, vocab_only=True)
        untried.replace(path)
    finally:
        untried.unlink(missing_ok=True)
    return path


def _content(header: GgufHeader) -> bytes:
    writer = HeaderWriter()
    for key, entry in header.metadata.items():
        if key in _ENTRIES:
            writer.copy(header, entry)
    return writer.finish()

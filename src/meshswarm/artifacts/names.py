"""What people call models: short names made from file names and headers.

The rule this file keeps: a name is a convenience, never an identity. It is made the same way by everyone who has the
file under its usual name, two models may share one, and whoever resolves a name must be ready for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MAX_NAME_CHARS = 96
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_ENCODING = re.compile(
    r"[-_.](?P<encoding>(?:iq|q|tq)\d(?:_[a-z0-9]+)*|mxfp4(?:_moe)?|bf16|f16|f32|fp16|fp32)$", re.IGNORECASE
)
_MEANINGLESS = frozenset({"model", "ggml-model", "gguf", "download", "file", "unnamed"})


def clean_name(text: str) -> str:
    """Lower case, with single dashes for everything but letters, digits, dots and underscores. May be empty."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")[:MAX_NAME_CHARS].rstrip("-._")


def split_encoding(name: str) -> tuple[str, str]:
    """A file's stem without the encoding of its weights, and that encoding in lower case, empty when it names none:
    ("SmolLM2-135M-Instruct", "q4_1") of "SmolLM2-135M-Instruct.Q4_1"."""
    match = _ENCODING.search(name)
    return (name, "") if match is None else (name[: match.start()], match["encoding"].lower())


def model_name(file_stem: str, general_name: str | None) -> str:
    """The name of a model: from its file's stem, unless that says nothing and the header's `general.name` does."""
    from_file = clean_name(split_encoding(file_stem)[0])
    if from_file and from_file not in _MEANINGLESS:
        return from_file
    return clean_name(general_name or "") or from_file or "unnamed"


def matches(ref: str, name: str, encoding: str) -> bool:
    """True when `ref` names the model `name` stored as `encoding`: by the name, or by both joined as file names do."""
    wanted = clean_name(ref.removesuffix(".gguf"))
    return bool(wanted) and wanted in (
        clean_name(name),
        clean_name(f"{name}-{encoding}"),
        clean_name(f"{name}.{encoding}"),
    )


def did_you_mean(ref: str, names: Iterable[str]) -> str:
    """The end of a sentence that asks whether one of `names` was meant; empty where none of them is like `ref`."""
    alike = get_close_matches(clean_name(ref.removesuffix(".gguf")), sorted(set(names)), n=1, cutoff=0.75)
    return f"; did you mean {alike[0]}?" if alike else ""

"""Whether a row of the table lists everything that a model has.

The rule this file keeps: what a row does not list was never proved in a part of a model, so the model is not split,
and the sentence names it. All of it is asked of the header, before anything is cut.
"""

from __future__ import annotations

import re

from meshswarm.artifacts.gguf.container import Entry, GgufHeader
from meshswarm.stage.families.family import DROPPED_KEYS, Family

_PRECISIONS = "general.tensor_extra."
"""Names tensors that llama.cpp computes with at another precision; by the names of the whole model."""
_OUTER_TENSORS = frozenset({"token_embd.weight", "output.weight"})


def unlisted(header: GgufHeader, family: Family, n_layers: int) -> str | None:
    """What stands against splitting this model, as a sentence that names it; None when its row lists all it has."""
    prefix = family.architecture + "."
    for key, entry in header.metadata.items():
        if key.startswith(_PRECISIONS):
            return _sentence(header, f"what its setting {key} means to a part of it")
        if key.startswith(prefix):
            fault = _setting_fault(header, family, key.removeprefix(prefix), entry, n_layers)
            if fault is not None:
                return fault
    known = _OUTER_TENSORS | family.shared_tensors | family.last_tensors | family.factors_by_context
    for name in header.tensors:
        if name not in known and not re.match(r"blk\.\d+\.", name):
            return _sentence(header, f"which spans need its tensor {name}")
    return None


def _setting_fault(header: GgufHeader, family: Family, name: str, entry: Entry, n_layers: int) -> str | None:
    patterned = {key for pattern in family.patterns for key in (pattern.key, pattern.period_key)}
    if name in patterned | DROPPED_KEYS:
        return None
    by_layer = family.uniform_keys | family.layer_keys
    if name not in by_layer | family.common_keys | family.count_keys | family.first_keys:
        return _sentence(header, f"what its setting {entry.key} means to a part of it")
    if name in family.proved_texts and header.text(entry.key) not in family.proved_texts[name]:
        return _sentence(header, f"what {header.text(entry.key)!r} as its setting {entry.key} means to a part of it")
    if entry.is_array and name in by_layer:
        values = header.numbers(entry.key)
        if values is None or len(values) < n_layers:
            return f"{header.source} cannot be split: its setting {entry.key} has no item for some layers"
        if name in family.uniform_keys and (values != values[0]).any():
            return f"{header.source} cannot be split: its setting {entry.key} differs between layers"
    return None


def _sentence(header: GgufHeader, what: str) -> str:
    return f"{header.source} cannot be split: no test has proved {what}"

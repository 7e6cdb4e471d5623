"""Which of the models that are here a person means.

The rule this file keeps: an id comes before a name, a name before the beginning of an id; of several models under one
name the publisher whom this peer trusts decides, and where there is none nobody guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from meshswarm.artifacts import sources
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.names import clean_name, matches
from meshswarm.errors import RequestError

MIN_PREFIX_CHARS = 8
"""Shorter beginnings of an id are too easy to hit by accident."""


class AmbiguousModelError(RequestError):
    """A name that several models share; the message lists their ids."""


def one_of(
    infos: Sequence[ModelInfo],
    ref: str,
    pinned: Callable[[str], bytes | None],
    at: Callable[[Path], Collection[bytes]],
) -> ModelInfo | None:
    """The model that `ref` means; None when it is none of these. Raises AmbiguousModelError.

    `pinned`: the id that a name has with its trusted publisher. `at`: ids of the models of which a file is the path.
    """
    exact = [info for info in infos if info.id_text == ref]
    named = [info for info in infos if matches(ref, info.name, info.encoding)]
    prefixed = [info for info in infos if len(ref) >= MIN_PREFIX_CHARS and info.id_text.startswith(ref)]
    found = exact or named or prefixed
    if len(found) != 1:
        published = pinned(clean_name(ref.removesuffix(".gguf")))
        found = [info for info in infos if info.model_id == published] or found
    if not found and sources.is_source(ref):
        lie_there = at(Path(ref).expanduser().absolute())
        found = [info for info in infos if info.model_id in lie_there]
    if len(found) > 1:
        ids = ", ".join(f"{info.id_text} ({info.encoding})" for info in found)
        raise AmbiguousModelError(f"{ref[:80]!r} may be any of {len(found)} models; say which: {ids}", param="model")
    return found[0] if found else None

"""Servers and hubs that a person or a manifest names for a model, found when they are needed.

The rule this file keeps: whoever waits for a model waits for peers and the web at once, so a hub that does not answer
delays nobody. What a stranger named is asked at public addresses only; what this peer's own user named, anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshswarm.errors import ArtifactError

if TYPE_CHECKING:
    from meshswarm.artifacts.sources.http_source import HttpSource


@dataclass(frozen=True, slots=True)
class WebModel:
    """All files of a model at one `hf:` or `https:` reference. `lengths`: theirs, as the model id proves them."""

    where: str
    lengths: tuple[int, ...]
    is_strangers: bool

    async def locate(self) -> tuple[HttpSource, ...]:
        """One source for each file, in order. Raises MeshswarmError where this is not to be used."""
        return await asyncio.to_thread(self._locate)

    def _locate(self) -> tuple[HttpSource, ...]:
        from meshswarm.artifacts.sources.remote import locate  # its HTTP client takes time to import
        from meshswarm.artifacts.sources.url_rules import UrlRules

        # Of a hub a stranger chooses the file, and this machine's own settings which hub that is.
        rules = UrlRules(is_strangers=self.is_strangers and not self.where.startswith("hf:"))
        located = locate(self.where, Path(), rules)
        if len(located) != len(self.lengths):
            raise ArtifactError(f"{self.where} has {len(located)} files, and the model {len(self.lengths)}")
        for each, length in zip(located, self.lengths, strict=True):
            if each.expected.length not in (None, length):
                raise ArtifactError(f"{self.where} has another file now: {each.expected.length} bytes, not {length}")
        return tuple(each.source for each in located)


def web_models(own: Sequence[str], published: Sequence[str], lengths: Sequence[int]) -> tuple[WebModel, ...]:
    """The references that a person typed, and those of a manifest."""
    named = [WebModel(ref, tuple(lengths), is_strangers=False) for ref in own]
    return (*named, *(WebModel(ref, tuple(lengths), is_strangers=True) for ref in published if ref not in own))

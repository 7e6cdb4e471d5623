"""A remote file of a model, ready to be fetched: what every kind of reference comes down to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.part_file import Expected


@dataclass(frozen=True, slots=True)
class Located:
    """`target`: where it lies once it is fetched. `expected`: what whoever located it says of it."""

    source: HttpSource
    target: Path
    expected: Expected

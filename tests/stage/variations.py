"""A tiny model that is changed in one thing, cut as a peer would cut it: bit for bit the unsplit model's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.stage.chain import Session
from tests.stage.family_parity import Proof, Row, differences, route
from tests.stage.tiny_models import write_tiny
from tests.stage.unsplit import Unsplit

from meshswarm.stage.engine.profile import Profile


@dataclass(frozen=True)
class Variation:
    """A tiny model, what about it is changed, and where it is cut (None: everywhere it can be).

    `is_same`: the change is another way to write the same model. `n_prompt`: tokens enough for the change to tell.
    """

    name: str
    what: str
    changes: Mapping[str, Any]
    at: tuple[int, ...] | None = None
    is_same: bool = False
    n_prompt: int = 70

    @property
    def id(self) -> str:
        return f"{self.name}, {self.what}"


def keys(**settings: Any) -> dict[str, Any]:
    """Changes of metadata; "__" stands for a dot."""
    return {"keys": {name.replace("__", "."): value for name, value in settings.items()}}


async def check_variation(variation: Variation, folder: Path) -> None:
    """Fails where a chain computes other bits than the unsplit model, or where the change changes nothing."""
    proof = Proof(Row(variation.name, variation.changes, n_prompt=variation.n_prompt), folder / "family")
    steps = proof.conversation(Profile.FAST).steps
    chains = proof.span_chains() if variation.at is None else [proof.spans(*variation.at)]
    for spans in chains:
        with Session(proof.hops(spans), Profile.FAST) as session:
            assert not await differences(session, steps), f"through {route(spans)}"
    await proof.close()
    plain = Unsplit(write_tiny(variation.name, folder / "plain.gguf"))
    is_same = all(
        np.array_equal(plain.rows(step.tokens, step.pos0, range(len(step.tokens))), step.logits)
        for step in steps
        if step.pos0 < variation.n_prompt
    )
    plain.close()
    assert is_same is variation.is_same, "the change is not what it is said to be"

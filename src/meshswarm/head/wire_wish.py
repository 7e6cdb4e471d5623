"""In which dtype a head wishes rows to be sent between spans, and what a person hears where they are not.

The rule this file keeps: a wish that is not granted is said, once for each model and reason, wherever the layers are.
What was proved is read from the disk anew each time, since it may be proved while the peer runs; in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.config import WireChoice
from meshswarm.stage.proving.wire_proofs import F32_WIRE, Wire, WireProofs
from meshswarm.stage.sessions.messages import Dtype


class WireWish:
    """What was chosen with `--wire`, looked up in `proofs` for each model. `say` takes a sentence."""

    def __init__(self, choice: WireChoice, proofs: WireProofs, say: Callable[[str], None]) -> None:
        self._choice = choice
        self._proofs = proofs
        self._say = say
        self._said: set[tuple[bytes, Wire]] = set()

    async def of(self, model: ModelCard | ModelInfo) -> Wire:
        """What to ask of a route for this model."""
        wire = await self._granted(model)
        if self._choice is not WireChoice.F32 and wire.dtype is Dtype.F32:
            asked = "anything narrower" if self._choice is WireChoice.AUTO else str(self._choice)
            why_not = await asyncio.to_thread(self._proofs.why_not, model.model_id)
            self._say_once(
                (model.model_id, F32_WIRE), f"rows of {model.name} go over the wire in f32: {asked} {why_not}"
            )
        return wire

    async def facts(self, model: ModelCard | ModelInfo | None) -> dict[str, str | None]:
        """For the status: what was asked for, and what is granted for this model, None without one."""
        granted = None if model is None else str((await self._granted(model)).dtype)
        return {"asked": str(self._choice), "granted": granted}

    async def _granted(self, model: ModelCard | ModelInfo) -> Wire:
        if self._choice is WireChoice.F32:
            return F32_WIRE
        return await asyncio.to_thread(self._proofs.choose, self._choice, model.model_id)

    def met(self, model: ModelCard | ModelInfo, wire: Wire, n_hops: int) -> None:
        """A route with so many hops between its spans was opened."""
        if wire.over(n_hops) is not wire.dtype:
            self._say_once(
                (model.model_id, wire),
                f"rows of {model.name} go over the wire in f32 on a route through {n_hops + 1} peers: {wire.dtype} is "
                f"proved for at most {wire.max_hops + 1}",
            )

    def _say_once(self, what: tuple[bytes, Wire], sentence: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(sentence)

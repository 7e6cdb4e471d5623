"""Which wire dtypes are proved for a model, as `meshswarm models prove` wrote it down, and which one a head asks for.

The rule this file keeps: F32 is always allowed. Another dtype is, when it passed on this very artifact, on the
installed build of llama.cpp, and over at least as many hops between spans as the route has. Whatever cannot be read
proves nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshswarm.artifacts.files import read_json, write_json
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.config import WireChoice
from meshswarm.stage.families.proofs import installed_build
from meshswarm.stage.sessions.messages import Dtype

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Wire:
    """The dtype that rows may take between spans, on routes with at most `max_hops` hops between them."""

    dtype: Dtype
    max_hops: int

    def over(self, hops: int) -> Dtype:
        return self.dtype if hops <= self.max_hops else Dtype.F32


F32_WIRE = Wire(Dtype.F32, 0)


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far two computations of the same rows are from each other. `agreement`: share of the rows with the same best
    token; the others are of the next token's distribution, in nats, on average and at one row in a hundred."""

    agreement: float
    mean_kl: float
    p99_kl: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a dtype must reach against F32 to be used.

    The first three are about what keeping weights in 8 bits instead of 16 costs (llama.cpp's own measurements, in its
    tools/perplexity/README.md: 0.0004 to 0.0014 nats, and 97.7 to 98.8 % the same best tokens). A small or coarsely
    quantised model is farther than that from itself: which rows are computed together already changes its numbers.
    That distance is measured, and a dtype may go `noise_factor` times as far, and agree at `agreement_loss` fewer of
    the rows. `f16_headroom`: the largest hidden state must stay this many times below the largest half, since other
    prompts may go higher; not more, since the largest ones of a model hardly depend on the prompt (Sun et al., Massive
    Activations in Large Language Models, 2024).
    """

    max_mean_kl: float = 1e-3
    max_p99_kl: float = 1e-2
    min_agreement: float = 0.985
    noise_factor: float = 1.5
    agreement_loss: float = 0.01
    f16_headroom: float = 2.0

    def within(self, noise: Divergence) -> Divergence:
        """The farthest a dtype may go in a model that is so far from itself."""
        return Divergence(
            min(self.min_agreement, noise.agreement - self.agreement_loss),
            max(self.max_mean_kl, self.noise_factor * noise.mean_kl),
            max(self.max_p99_kl, self.noise_factor * noise.p99_kl),
        )


@dataclass(frozen=True, slots=True)
class DtypeResult:
    """How a dtype did. `divergence` None: its rows could not be sent. `obstacle`: why it is not used."""

    dtype: Dtype
    divergence: Divergence | None
    obstacle: str | None


@dataclass(frozen=True, slots=True)
class WireProof:
    """What was found about one model. `hops`: how often rows went over the wire on their way. `largest`: the largest
    |x| of a hidden state that did. `noise`: how far the model is from itself in other company. `thresholds`: those that
    were in force."""

    model_id: str
    build: str
    numclass: str
    spans: tuple[str, ...]
    n_rows: int
    largest: float
    noise: Divergence
    results: tuple[DtypeResult, ...]
    thresholds: Thresholds = Thresholds()

    @property
    def hops(self) -> int:
        return len(self.spans) - 1

    def proved(self) -> tuple[Dtype, ...]:
        return (Dtype.F32, *(result.dtype for result in self.results if result.obstacle is None))

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


class WireProofs:
    """The proofs in `folder`, one file a model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, model_id: bytes, proof: WireProof) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(model_id), proof.as_json())

    def of(self, model_id: bytes) -> WireProof | None:
        """What is known, on whichever build; None when nothing is."""
        fields = read_json(self._path(model_id))
        try:
            proof = None if fields is None else _parsed(fields)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return proof if proof is not None and proof.model_id == model_id_text(model_id) else None

    def choose(self, choice: WireChoice, model_id: bytes) -> Wire:
        """The dtype a head asks for, and over how many hops between spans it may."""
        proof = None if choice is WireChoice.F32 else self.of(model_id)
        if proof is None or proof.build != installed_build():
            return F32_WIRE
        if choice is WireChoice.AUTO:
            dtype = next(dtype for dtype in (Dtype.Q8, Dtype.F16, Dtype.F32) if dtype in proof.proved())
        else:
            dtype = Dtype(choice.value)
        return Wire(dtype, proof.hops) if dtype in proof.proved() else F32_WIRE

    def why_not(self, model_id: bytes) -> str:
        """The rest of a sentence about a dtype that `choose` did not grant."""
        proof = self.of(model_id)
        if proof is not None and proof.build == installed_build():
            return "was tried by `meshswarm models prove`, and did harm"
        return "is not proved for it on this machine; `meshswarm models prove`, with its file, may prove it"

    def _path(self, model_id: bytes) -> Path:
        return self._folder / f"{model_id_text(model_id)}.json"


def _parsed(fields: dict[str, Any]) -> WireProof | None:
    """Raises for whatever is not what `as_json` wrote."""
    if fields["format"] != FORMAT:
        return None
    results = tuple(
        DtypeResult(
            Dtype(result["dtype"]),
            None if result["divergence"] is None else _divergence(result["divergence"]),
            None if result["obstacle"] is None else str(result["obstacle"]),
        )
        for result in fields["results"]
    )
    return WireProof(
        str(fields["model_id"]),
        str(fields["build"]),
        str(fields["numclass"]),
        tuple(map(str, fields["spans"])),
        int(fields["n_rows"]),
        _number(fields["largest"]),
        _divergence(fields["noise"]),
        results,
        Thresholds(**{key: _number(value) for key, value in fields["thresholds"].items()}),
    )


def _divergence(fields: dict[str, Any]) -> Divergence:
    return Divergence(*(_number(fields[name]) for name in ("agreement", "mean_kl", "p99_kl")))


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)

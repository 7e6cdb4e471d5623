"""On which builds of llama.cpp the table's cuts are proved, and what was found on this machine about single models.

The rule this file keeps: a proof belongs to the build it ran on, since node names, metadata and arithmetic change
between builds without notice. On another build a model is not split until this machine has proved that very model
itself, and then only as it was tried. Where parts of a model were found to compute something else, it is not split on
any build where that was found.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshswarm.artifacts.files import read_json, write_json
from meshswarm.artifacts.merkle import model_id_text

PROVED_BUILDS = frozenset({"0.3.36"})
"""Versions of llama-cpp-python on which the parity tests of this project passed."""
FORMAT = 1


def installed_build() -> str:
    """The version of llama-cpp-python that is installed."""
    return importlib.metadata.version("llama_cpp_python")


@dataclass(frozen=True, slots=True)
class CutProof:
    """What `meshswarm models prove` found about one model on one build.

    Every span between two of `starts`, or from one to the end, computed the whole model's bits in the numclass
    `numclass`, in sessions of `max_ctx` positions (None: of any length it may have). `refusal`: why it must not be
    split after all, as a clause.
    """

    numclass: str
    starts: tuple[int, ...] = ()
    max_ctx: int | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Proofs:
    """What is proved about a model on `build`: what the table says on a proved one, on another what was found `here`.

    `is_trial`: the table is taken at its word, so that it can be tried.
    """

    build: str
    found: CutProof | None = None
    is_trial: bool = False

    @classmethod
    def installed(cls) -> Proofs:
        """On the installed build, knowing nothing of single models."""
        return cls(installed_build())

    @classmethod
    def here(cls, folder: Path, model_id: bytes, numclass: str) -> Proofs:
        """On the installed build, with what `note` wrote into `folder` about this model for this numclass."""
        build = installed_build()
        found = _read(folder, model_id).get(build)
        if found is not None and found.refusal is None and found.numclass != numclass:
            found = None
        return cls(build, found)

    @classmethod
    def trial(cls) -> Proofs:
        return cls(installed_build(), is_trial=True)

    @property
    def cover_table(self) -> bool:
        return self.is_trial or self.build in PROVED_BUILDS

    @property
    def is_refuted(self) -> bool:
        """Whether parts of this model were found to compute something else than the whole."""
        return self.found is not None and self.found.refusal is not None


def note(folder: Path, model_id: bytes, found: CutProof) -> None:
    """Write down what was found about a model on the installed build, instead of what was known about it there."""
    known = _read(folder, model_id)
    known[installed_build()] = found
    folder.mkdir(parents=True, exist_ok=True)
    builds = {build: asdict(proof) for build, proof in known.items()}
    write_json(_path(folder, model_id), {"format": FORMAT, "model_id": model_id_text(model_id), "builds": builds})


def _path(folder: Path, model_id: bytes) -> Path:
    return folder / f"{model_id_text(model_id)}.cuts.json"


def _read(folder: Path, model_id: bytes) -> dict[str, CutProof]:
    """By build. Whatever cannot be read proves nothing."""
    fields = read_json(_path(folder, model_id)) or {}
    if fields.get("format") != FORMAT or fields.get("model_id") != model_id_text(model_id):
        return {}
    try:
        return {str(build): _parsed(proof) for build, proof in fields["builds"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _parsed(fields: dict[str, Any]) -> CutProof:
    """Raises for whatever is not what `note` wrote."""
    max_ctx, refusal = fields["max_ctx"], fields["refusal"]
    return CutProof(
        str(fields["numclass"]),
        tuple(int(start) for start in fields["starts"]),
        None if max_ctx is None else int(max_ctx),
        None if refusal is None else str(refusal),
    )

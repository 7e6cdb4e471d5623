"""How fast this machine turned out to compute models, kept from one `meshswarm bench` to the next plan.

The rule this file keeps: a damaged file, or one of another program, counts as knowing nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshswarm.artifacts.files import read_json, write_json

MAX_MODELS = 256


@dataclass(frozen=True, slots=True)
class OwnSpeed:
    """µs a lone row takes in one of the `layers` that were timed, at `unix_s`."""

    us_per_layer: float
    layers: str
    unix_s: float


class OwnSpeeds:
    """In the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, model_id: str) -> OwnSpeed | None:
        """None where the model was never timed here."""
        return _own_speed((read_json(self._path) or {}).get(model_id))

    def note(self, model_id: str, speed: OwnSpeed) -> None:
        """Raises ArtifactError when the disk refuses."""
        known = {key: value for key, value in (read_json(self._path) or {}).items() if key != model_id}
        latest = list(known.items())[-(MAX_MODELS - 1) :]
        fields = {"us_per_layer": speed.us_per_layer, "layers": speed.layers, "unix_s": speed.unix_s}
        write_json(self._path, {**dict(latest), model_id: fields})


def _own_speed(fields: Any) -> OwnSpeed | None:
    try:
        speed = OwnSpeed(float(fields["us_per_layer"]), str(fields["layers"])[:16], float(fields["unix_s"]))
    except (TypeError, ValueError, KeyError):
        return None
    return speed if 0 < speed.us_per_layer < 1e9 else None

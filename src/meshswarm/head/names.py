"""What names have meant here: a name that was used once goes on meaning the same model.

The rule this file keeps: a name is remembered once its model's header was proved and an answer was given, and never
because somebody says so. The file is plain JSON and a hint: one that is damaged or far too large is left aside with a
sentence, and never keeps a peer from starting.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from meshswarm.artifacts.merkle import HASH_BYTES
from meshswarm.artifacts.names import MAX_NAME_CHARS, clean_name

MAX_NAMES = 256
MAX_AGE_S = 90 * 86400.0
_RENEW_S = 86400.0  # a use is written down when the last one that was is this old
_MAX_FILE_BYTES = 128 * 1024
_VERSION = 1

logger = logging.getLogger(__name__)


class RememberedNames:
    """Model ids by the names clients used, in the swarm `swarm_id`; kept beside `path`, with the swarm in its name.

    Blocking: for a thread, but for `get` after the first time.
    """

    def __init__(self, path: Path, swarm_id: bytes) -> None:
        self.path = path.with_name(f"{path.stem}-{swarm_id[:8].hex()}{path.suffix}")
        self._known: dict[str, tuple[bytes, float]] | None = None

    def get(self, ref: str, now_s: float) -> bytes | None:
        """The model id that `ref` meant when it was last answered."""
        model_id, used_s = self._all().get(_key(ref), (None, 0.0))
        return model_id if now_s - used_s <= MAX_AGE_S else None

    def recent(self, now_s: float) -> list[bytes]:
        """The models that were asked for by a name, the last one first."""
        used = sorted(self._all().values(), key=lambda each: -each[1])
        return list(dict.fromkeys(model_id for model_id, used_s in used if now_s - used_s <= MAX_AGE_S))

    def keep(self, ref: str, model_id: bytes, now_s: float) -> None:
        """`ref` was answered by this model, whose header was proved."""
        known, name = self._all(), _key(ref)
        before, used_s = known.get(name, (None, 0.0))
        if not name or (before == model_id and 0 <= now_s - used_s < _RENEW_S):
            return
        known[name] = (model_id, now_s)
        for oldest in sorted(known, key=lambda each: known[each][1])[: max(0, len(known) - MAX_NAMES)]:
            del known[oldest]
        self._save(known)

    def _all(self) -> dict[str, tuple[bytes, float]]:
        if self._known is None:
            self._known = self._load()
        return self._known

    def _load(self) -> dict[str, tuple[bytes, float]]:
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if saved["version"] != _VERSION:
                raise ValueError
            return dict(_entry(each) for each in saved["names"][:MAX_NAMES])
        except FileNotFoundError:
            return {}
        except OSError as error:
            why = error.strerror or str(error)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            why = "it is damaged"
        logger.warning("the names in %s are ignored: %s", self.path, why)
        return {}

    def _save(self, known: dict[str, tuple[bytes, float]]) -> None:
        names = [{"name": name, "model": used[0].hex(), "used_s": used[1]} for name, used in known.items()]
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps({"version": _VERSION, "names": names}, indent=1), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            logger.warning("the names could not be saved to %s: %s", self.path, error.strerror or error)
            temporary.unlink(missing_ok=True)


def _key(ref: str) -> str:
    return clean_name(ref[: 2 * MAX_NAME_CHARS].removesuffix(".gguf"))


def _entry(saved: Any) -> tuple[str, tuple[bytes, float]]:
    """Raises one of the errors of plain data for anything but an entry."""
    name, model_id, used_s = saved["name"], bytes.fromhex(saved["model"]), float(saved["used_s"])
    if not name or name != _key(name) or len(model_id) != HASH_BYTES or not 0 <= used_s < 2**53:
        raise ValueError("not a name and a model")
    return name, (model_id, used_s)

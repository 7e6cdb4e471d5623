"""Whether a model that is not here can be had now: room on the disk, an answer from where it comes from, a size that a
peer may fetch without being asked.

The rule this file keeps: nothing is fetched to find out, a place that does not answer at once counts as out of reach,
and who set HF_HUB_OFFLINE is never made to ask the hub.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from meshswarm.artifacts import sources
from meshswarm.artifacts.sources.faults import DeniedError, MissingError
from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.hub_ref import HubRef
from meshswarm.errors import MeshswarmError
from meshswarm.routing.demand import Offer
from meshswarm.stage.engine.memory import in_words

MAX_ALONE_BYTES = 4 * 10**9
"""No more is fetched of a model that nobody else serves, unless a person names it: 11 minutes at 50 Mbit/s."""
KEEP_FREE_BYTES = 2 << 30
"""So much of the disk is left to its owner."""
PROBE_S = 3.0
HUB = "https://huggingface.co"
_TRUE = {"1", "on", "yes", "true"}


def is_fetched(ref: str) -> bool:
    """Whether all files of a source lie among this user's downloads already. Blocks for a moment."""
    folder = sources.artifact_folder()
    if ref.startswith("hf:"):
        return all(target.is_file() for target in HubRef.parse(ref).targets(folder))
    pinned = sources.pypi_model(ref)
    return pinned is not None and (folder / pinned.file_name).is_file()


class Reach:
    """`folder`: on the disk that models come to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hub_is_out_of_reach = os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE

    async def obstacle(self, offer: Offer) -> str:
        """Why the model cannot be had now, as a clause; empty where nothing is known against it."""
        if not offer.to_fetch:
            return ""
        if not offer.is_served and offer.to_fetch > MAX_ALONE_BYTES:
            return f"{in_words(offer.to_fetch)} are more than is fetched without being asked"
        free = await self.free_bytes()
        if offer.to_fetch + KEEP_FREE_BYTES > free:
            return f"it takes {in_words(offer.to_fetch)} of the disk, where {in_words(free)} are free"
        if offer.ref.startswith("hf:") and not await self._is_on_hub(HubRef.parse(offer.ref)):
            return "the hub cannot be reached, or does not give it"
        return ""

    async def free_bytes(self) -> int:
        """Of the disk."""
        return await asyncio.to_thread(lambda: shutil.disk_usage(self._folder).free)

    async def _is_on_hub(self, ref: HubRef) -> bool:
        if self._hub_is_out_of_reach:
            return False
        hub = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
        url = f"{hub}/{ref.repo_id}/resolve/{ref.revision or 'main'}/{ref.file}"
        try:
            async with asyncio.timeout(PROBE_S), HttpSource(url) as source:
                await source.probe()
        except (DeniedError, MissingError):
            return False
        except (MeshswarmError, TimeoutError, OSError):
            self._hub_is_out_of_reach = True  # one wait is enough
            return False
        return True

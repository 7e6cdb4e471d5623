"""Room on the disk for what is about to come: the pieces that are fetched, and the slice that is cut from them.

The rule this file keeps: all that is coming is counted together, from before the first byte until it is there, so what
was granted once fits to its end, and what can never fit is refused at once, with how much it would take. Nothing that
is loaded, open to write or about to be read goes for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from meshswarm.artifacts.ranges import Ranges, merged
from meshswarm.artifacts.store.disk import Disk, Holding, Kind, choose_evictions
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.fetching.fetch import Wanted
from meshswarm.fetching.plan import missing_pieces
from meshswarm.stage.slices.store import Slices

MAX_COUNTED = 32
"""Models of which it is asked who else holds them, when some have to go."""
COUNT_S = 5.0
"""How long that may take."""
NOTES_BYTES = 64 << 10
"""What notes beside the files, and blocks that are not full, may take beyond what is planned for a model."""


@dataclass(frozen=True, slots=True)
class Coming:
    """Bytes that are not here yet."""

    piece_bytes: int
    cut_bytes: int

    @property
    def n_bytes(self) -> int:
        """All, with what lies beside them."""
        return self.piece_bytes + self.cut_bytes + (NOTES_BYTES if self.piece_bytes or self.cut_bytes else 0)


class Room:
    """`made` for what is wanted, `expect` what is loaded next. `quota_bytes`: None for as much as there is.

    `n_holders`: how many other peers hold a model; `closed`: while it lasts, the files of models are not open here;
    `warn`: for a person. Of one loop.
    """

    def __init__(
        self,
        disk: Disk,
        store: Store,
        slices: Slices,
        quota_bytes: int | None,
        *,
        n_holders: Callable[[bytes], Awaitable[int]],
        closed: Callable[[Collection[bytes]], AbstractAsyncContextManager[None]],
        warn: Callable[[str], None],
    ) -> None:
        self._disk = disk
        self._store = store
        self._slices = slices
        self._quota_bytes = quota_bytes
        self._n_holders = n_holders
        self._closed = closed
        self._warn = warn
        self._lock = asyncio.Lock()
        self._granted: list[Wanted] = []
        self._expected: Wanted | None = None

    def expect(self, wanted: Wanted | None) -> None:
        """This is read, cut and loaded next: until the slice is there its pieces stay, and the slice after that, until
        something else is expected, or nothing."""
        self._expected = wanted

    @contextlib.asynccontextmanager
    async def made(self, wanted: Wanted) -> AsyncIterator[None]:
        """There is room for all of it as long as this lasts, perhaps because other things went.

        Raises ArtifactError, and nothing went, where that cannot be.
        """
        if self._quota_bytes is not None:
            async with self._lock:
                await self._make(wanted, self._quota_bytes)
                self._granted.append(wanted)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                self._granted.remove(wanted)

    async def _make(self, wanted: Wanted, quota_bytes: int) -> None:
        others = [*self._granted, *self._about_to_be_read()]
        needs = await asyncio.to_thread(self._needs, [*others, wanted])
        own = await asyncio.to_thread(self._coming, [wanted])
        wanted_bytes = (await asyncio.to_thread(self._coming, [*others, wanted])).n_bytes
        in_use = {each.model_id for each in self._granted} | self._slices.loaded_models(whole=True)
        paths = {each.slice_path for each in (*others, wanted, self._expected) if each is not None and each.slice_path}
        holdings = await asyncio.to_thread(self._disk.holdings, needs)
        is_short = sum(holding.n_bytes for holding in holdings) + wanted_bytes > quota_bytes
        eviction = choose_evictions(
            holdings,
            quota_bytes=quota_bytes,
            wanted_bytes=wanted_bytes,
            in_use=in_use,
            slices_in_use=paths | self._slices.loaded(),
            served=self._slices.loaded_models(),
            n_holders=await self._count_holders(holdings) if is_short else {},
        )
        if eviction.short_bytes:
            raise ArtifactError(_refusal(wanted, own, quota_bytes, quota_bytes + eviction.short_bytes))
        pieces = {holding.model_id for holding in eviction.go if holding.kind is Kind.PIECES}
        async with self._closed(pieces):
            for holding in eviction.go:
                await asyncio.to_thread(self._disk.remove, holding)
                self._tell(holding)

    def _about_to_be_read(self) -> list[Wanted]:
        expected = self._expected
        is_cut = expected is not None and expected.slice_path is not None and expected.slice_path.exists()
        return [] if expected is None or is_cut else [expected]

    def _needs(self, wants: Sequence[Wanted]) -> dict[bytes, tuple[Ranges, ...]]:
        """Which bytes of each model's files are wanted, by all together; and the pieces that lie in the headers, which
        a fetch writes to where others can have them too. Blocks."""
        needs: dict[bytes, tuple[Ranges, ...]] = {}
        for each in wants:
            before = needs.get(each.model_id) or self._header_pieces(each.model_id)
            needs[each.model_id] = tuple(merged([*a, *b]) for a, b in zip(before, each.files, strict=True))
        return needs

    def _header_pieces(self, model_id: bytes) -> tuple[Ranges, ...]:
        parts = zip(self._store.header(model_id).files, self._store.contents(model_id), strict=True)
        return tuple(tuple(c.ranges_of(c.pieces_within([range(part.data_offset)]))) for part, c in parts)

    def _coming(self, wants: Sequence[Wanted]) -> Coming:
        """What all these bring together. Blocks where files were touched."""
        piece_bytes = 0
        for model_id, files in self._needs(wants).items():
            for content, want, have in zip(
                self._store.contents(model_id), files, self._store.ranges(model_id), strict=True
            ):
                piece_bytes += content.bytes_of(missing_pieces(content, want, have))
        slices = {each.slice_path: each.slice_bytes for each in wants if each.slice_path is not None}
        return Coming(piece_bytes, sum(slices.values()))

    async def _count_holders(self, holdings: Sequence[Holding]) -> dict[bytes, int]:
        """How many others hold each model, as far as that is known soon."""
        counts: dict[bytes, int] = {}

        async def count(model_id: bytes) -> None:
            with contextlib.suppress(MeshswarmError):
                counts[model_id] = await self._n_holders(model_id)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COUNT_S):
                models = list(dict.fromkeys(holding.model_id for holding in holdings))[:MAX_COUNTED]
                await asyncio.gather(*map(count, models))
        return counts

    def _tell(self, holding: Holding) -> None:
        what = "pieces that are not needed" if holding.needed else holding.kind
        if holding.kind is Kind.SLICE:
            what = f"slice {holding.path.stem.replace('-', ':')}"
        name = self._store.name_of(holding.model_id)
        self._warn(f"Removed the {what} of {name} ({holding.spare_bytes / 1e6:.0f} MB) to stay within --disk")


def _refusal(wanted: Wanted, own: Coming, quota_bytes: int, enough_bytes: int) -> str:
    parts = [f"{own.piece_bytes / 1e6:.1f} MB to fetch"] if own.piece_bytes else []
    parts += [f"{own.cut_bytes / 1e6:.1f} MB for the slice that is cut from it"] if own.cut_bytes else []
    enough = f"{-(-enough_bytes // 100_000) / 10:.1f}MB"
    return (
        f"what is needed of {wanted.name} takes {' and '.join(parts) or 'nothing more'}, which does not fit into the "
        f"{quota_bytes / 1e6:.1f} MB of disk that this peer may use beside what is in use: it takes --disk {enough}, "
        "or fewer layers"
    )

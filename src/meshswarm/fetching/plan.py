"""Which bytes of a model's files are wanted, which are missing, and which source gets which pieces next.

The rule this file keeps: plain code without sockets or files. A piece is asked of one kind of source at a time, so that
nothing is fetched twice; peers take them from the front and the web from the back, until they meet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from meshswarm.artifacts.gguf.container import GgufHeader
from meshswarm.artifacts.ranges import Ranges, covers, merged
from meshswarm.artifacts.torrent.content import Content
from meshswarm.span import Span

PORTION_BYTES = 32 << 20
"""What peers get at a time while the web helps: little enough to share well, and enough to keep links busy."""


def whole_files(files: Sequence[tuple[int, bytes]]) -> tuple[Ranges, ...]:
    """All bytes of every (length, root)."""
    return tuple((range(length),) for length, _ in files)


def missing_pieces(content: Content, wanted: Iterable[range], held: Iterable[range]) -> frozenset[int]:
    """The pieces to be fetched so that all bytes of `wanted` are here."""
    return content.pieces_of(wanted) - content.pieces_within(merged(held))


@dataclass(frozen=True, slots=True)
class Tally:
    """How much a fetch is about, in bytes: what was asked for, and what the pieces take that hold it."""

    wanted_bytes: int
    piece_bytes: int

    @classmethod
    def of(cls, contents: Sequence[Content], wanted: Sequence[Iterable[range]]) -> Tally:
        joined = [merged(ranges) for ranges in wanted]
        return cls(
            sum(len(each) for ranges in joined for each in ranges),
            sum(c.bytes_of(c.pieces_of(ranges)) for c, ranges in zip(contents, joined, strict=True)),
        )


def layers_held(header: GgufHeader, held: Sequence[Ranges]) -> Span | None:
    """The longest stretch of layers all of whose tensors are in `held`, what is here of each of the model's files; the
    first of several as long. None where there is no such layer."""
    tensors: dict[int, list[list[range]]] = {}
    for tensor in header.tensors.values():
        prefix, _, rest = tensor.name.partition(".")
        number = rest.partition(".")[0]
        if prefix == "blk" and number.isdigit():
            start = header.position(tensor)
            files = tensors.setdefault(int(number), [[] for _ in held])
            files[tensor.file].append(range(start, start + tensor.n_bytes))
    return longest_run(
        layer
        for layer, files in tensors.items()
        if all(covers(have, wanted) for have, wanted in zip(held, files, strict=True) if wanted)
    )


def longest_run(layers: Iterable[int]) -> Span | None:
    """The longest stretch of numbers without a gap; the first of several."""
    best: Span | None = None
    start: int | None = None
    previous = 0
    for layer in sorted(layers):
        if start is None or layer != previous + 1:
            start = layer
        previous = layer
        if best is None or layer + 1 - start > len(best):
            best = Span(start, layer + 1)
    return best


class Portions:
    """The missing pieces of one file, given out to peers and to the web. `available`: the pieces that some peer has,
    None: nobody knows, so any of them may be asked of peers; `has_web`: there is a source on the web."""

    def __init__(
        self, content: Content, missing: Collection[int], *, available: Collection[int] | None, has_web: bool
    ) -> None:
        self._content = content
        self._has_web = has_web
        self._waiting = set(missing)
        self._out: set[int] = set()
        self._available = None if available is None else set(available)

    @property
    def is_done(self) -> bool:
        """Every piece is here."""
        return not self._waiting and not self._out

    @property
    def left(self) -> frozenset[int]:
        """Pieces that are not here yet."""
        return frozenset(self._waiting | self._out)

    def not_come(self, awaited: Collection[int]) -> frozenset[int]:
        """Pieces that nobody has sent yet, `awaited` being those that peers were asked for and have not."""
        return frozenset(self._waiting | self._out.intersection(awaited))

    def known_available(self, pieces: Collection[int]) -> None:
        """What peers have, as known now."""
        self._available = set(pieces)

    def only_from_web(self) -> frozenset[int]:
        """Pieces that no peer known here has."""
        return frozenset() if self._available is None else frozenset(self._waiting - self._available)

    def for_peers(self) -> tuple[int, ...]:
        """What peers are to be asked for now: everything they may have, or the next portion where the web helps."""
        may = sorted(self._waiting if self._available is None else self._waiting & self._available)
        return self._take(may, PORTION_BYTES if self._has_web else None)

    def for_web(self) -> list[int]:
        """What may be asked of the web now, the most urgent first: what peers do not have, then from the back. It is
        taken by being `done`."""
        rare = self.only_from_web()
        return [*sorted(rare), *sorted(self._waiting - rare, reverse=True)]

    def done(self, pieces: Iterable[int]) -> None:
        """These are here."""
        here = frozenset(pieces)
        self._out -= here
        self._waiting -= here

    def give_back(self, pieces: Iterable[int]) -> None:
        """These could not be had: whoever asks next gets them."""
        returned = self._out.intersection(pieces)
        self._out -= returned
        self._waiting |= returned

    def lose_web(self) -> None:
        """No source on the web is left."""
        self._has_web = False

    def _take(self, order: Sequence[int], most_bytes: int | None) -> tuple[int, ...]:
        taken: list[int] = []
        n_bytes = 0
        for piece in order:
            n_bytes += len(self._content.piece_range(piece))
            if taken and most_bytes is not None and n_bytes > most_bytes:
                break
            taken.append(piece)
        self._waiting.difference_update(taken)
        self._out.update(taken)
        return tuple(taken)


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is. `wanted_bytes`: of all pieces that hold what was asked for; `had_bytes`: those of them that
    were here at its start; `down_bytes_s`: now; `n_peers`: those that pieces come from; `waits_s`: where nobody gives
    anything, how long that is waited for at most, else None."""

    have_bytes: int
    wanted_bytes: int
    down_bytes_s: int
    n_peers: int
    from_web_bytes: int = 0
    had_bytes: int = 0
    waits_s: float | None = None

    @property
    def came_bytes(self) -> int:
        """What this fetch brought."""
        return self.have_bytes - self.had_bytes

    @property
    def eta_s(self) -> float | None:
        """Seconds until the rest is here at this rate; None while nothing comes."""
        left = self.wanted_bytes - self.have_bytes
        if left <= 0:
            return 0.0
        return left / self.down_bytes_s if self.down_bytes_s > 0 else None

    def __add__(self, other: FetchProgress) -> FetchProgress:
        """Of two files at the same time: rates add up; peers are the same ones."""
        return FetchProgress(
            self.have_bytes + other.have_bytes,
            self.wanted_bytes + other.wanted_bytes,
            self.down_bytes_s + other.down_bytes_s,
            max(self.n_peers, other.n_peers),
            self.from_web_bytes + other.from_web_bytes,
            self.had_bytes + other.had_bytes,
        )


class Averages:
    """A rate that a person can read: bytes over the last few seconds. Times in seconds on any clock."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def observe(self, now: float, total_bytes: int) -> int:
        """Bytes per second, `total_bytes` having come until `now`."""
        self._seen = [each for each in self._seen if now - each[0] <= self.WINDOW_S] + [(now, total_bytes)]
        began, first = self._seen[0]
        return int((total_bytes - first) / (now - began)) if now > began else 0

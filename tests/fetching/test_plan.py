from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.gguf.check import parse_header
from meshswarm.artifacts.ranges import merged
from meshswarm.artifacts.torrent.content import Content
from meshswarm.fetching.plan import (
    Averages,
    FetchProgress,
    Portions,
    Tally,
    layers_held,
    longest_run,
    missing_pieces,
    whole_files,
)
from meshswarm.span import Span

MIB = 1 << 20
CONTENT = Content(100 * MIB + 5, b"r" * 32)  # pieces of 256 KiB
ALL = frozenset(range(CONTENT.n_pieces))


def test_only_what_is_missing_is_fetched() -> None:
    piece = CONTENT.piece_length
    wanted = [range(10, piece + 10), range(CONTENT.length - 1, CONTENT.length)]
    assert missing_pieces(CONTENT, wanted, ()) == {0, 1, CONTENT.n_pieces - 1}
    assert missing_pieces(CONTENT, wanted, [range(piece)]) == {1, CONTENT.n_pieces - 1}
    half = [range(piece // 2), range(piece // 2, piece)]  # two notes about one piece
    assert missing_pieces(CONTENT, wanted, half) == {1, CONTENT.n_pieces - 1}
    assert missing_pieces(CONTENT, whole_files([(CONTENT.length, CONTENT.root)])[0], ()) == ALL


def test_a_third_of_a_real_sized_model_costs_little_more_than_its_bytes() -> None:
    """Layers of 3 MB behind an embedding of 20 MB, as in SmolLM2: the pieces at the ends are all that comes in vain."""
    layer = 2_600_000
    wanted = [range(20_000_000 + 10 * layer, 20_000_000 + 20 * layer)]
    tally = Tally.of([CONTENT], [wanted])
    assert tally.wanted_bytes == 10 * layer
    assert tally.piece_bytes <= 1.05 * tally.wanted_bytes


def test_layers_are_held_only_when_all_their_tensors_are_here(gguf_recipe: Any) -> None:
    recipe = gguf_recipe(5)
    header = parse_header(recipe.header(), recipe.file_length, source="a test")

    def of(layer: int) -> list[range]:
        tensors = [t for name, t in header.tensors.items() if name.startswith(f"blk.{layer}.")]
        return [range(header.data_offset + t.offset, header.data_offset + t.offset + t.n_bytes) for t in tensors]

    everything = [range(header.file_length)]
    assert layers_held(header, [merged(everything)]) == Span(0, 5)
    assert layers_held(header, [()]) is None
    assert layers_held(header, [merged([*of(1), *of(2), *of(4)])]) == Span(1, 3)
    assert layers_held(header, [merged([*of(1), *of(2)[:-1]])]) == Span(1, 2)
    assert layers_held(header, [merged([*of(1)[:3], *[range(r.start, r.stop - 1) for r in of(1)[3:]]])]) is None


def test_the_longest_stretch_is_told() -> None:
    assert longest_run([7, 1, 2, 5, 6]) == Span(5, 8)
    assert longest_run([3, 1]) == Span(1, 2)
    assert longest_run([]) is None


def test_without_a_web_source_peers_get_everything_at_once() -> None:
    portions = Portions(CONTENT, ALL, available=None, has_web=False)
    assert set(portions.for_peers()) == ALL
    assert portions.for_peers() == ()
    assert not portions.is_done
    portions.done(ALL)
    assert portions.is_done


def test_what_no_peer_has_comes_from_the_web_first() -> None:
    portions = Portions(CONTENT, ALL, available=ALL - {3, 4}, has_web=True)
    assert portions.only_from_web() == {3, 4}
    asked = portions.for_peers()
    assert not {3, 4}.intersection(asked)
    web = portions.for_web()
    assert web[:2] == [3, 4]
    assert web[2] == CONTENT.n_pieces - 1, "then from the back, towards the peers"
    assert not set(web).intersection(asked), "nothing is asked of both"
    portions.done([3, web[2]])
    assert 3 not in portions.for_web() and web[2] not in portions.left


def test_peers_are_not_asked_for_what_none_of_them_has() -> None:
    portions = Portions(CONTENT, {1, 2, 3}, available={2}, has_web=False)
    assert portions.for_peers() == (2,)
    assert portions.left == {1, 2, 3}
    portions.known_available({1, 2, 3})
    assert portions.for_peers() == (1, 3)


@given(
    missing=st.frozensets(st.integers(0, CONTENT.n_pieces - 1), max_size=80),
    available=st.none() | st.frozensets(st.integers(0, CONTENT.n_pieces - 1), max_size=200),
    steps=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=200),
)
def test_every_piece_is_out_once_at_most_and_none_is_lost(
    missing: frozenset[int], available: frozenset[int] | None, steps: list[tuple[bool, bool]]
) -> None:
    portions = Portions(CONTENT, missing, available=available, has_web=True)
    got: set[int] = set()
    for of_peers, succeeds in steps:
        portion = portions.for_peers() if of_peers else portions.for_web()[:7]
        assert not got.intersection(portion)
        assert missing.issuperset(portion)
        if succeeds:
            portions.done(portion)
            got.update(portion)
        else:
            portions.give_back(portion)
        assert portions.left == missing - got
    while portion := portions.for_web():
        portions.done(portion)
        got.update(portion)
    assert got == missing
    assert portions.is_done


def test_progress_of_several_files_adds_up() -> None:
    both = FetchProgress(10, 100, 5, 2) + FetchProgress(30, 100, 15, 3, from_web_bytes=7)
    assert both == FetchProgress(40, 200, 20, 3, 7)
    assert both.eta_s == 8.0
    assert FetchProgress(1, 2, 0, 0).eta_s is None
    assert FetchProgress(2, 2, 0, 0).eta_s == 0.0


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Averages()
    assert rate.observe(0.0, 0) == 0
    assert rate.observe(2.0, 2_000) == 1_000
    assert rate.observe(100.0, 2_000) == 0
    assert rate.observe(101.0, 3_000) == 1_000

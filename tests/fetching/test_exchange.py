"""What holders say of their files, over real sockets: honest ones, and those that say what cannot be."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.torrent.content import Content
from meshswarm.config import Address
from meshswarm.errors import RefusedError, RemoteProtocolError
from meshswarm.fetching.exchange import (
    LAYER_REQUEST,
    MAX_ASKERS,
    MAX_HASHES,
    MAX_LAYER_ANSWER_BYTES,
    MAX_OF_ONE_NETWORK,
    MAX_OTHERS,
    MAX_PIECES_BYTES,
    OTHERS_FOR_S,
    PIECES_REQUEST,
    Askers,
    Bits,
    Offer,
    Pieces,
    ask_piece_layer,
    ask_pieces,
    pack_bits,
    pack_layer_question,
    pack_pieces,
    pack_question,
    read_bits,
    read_layer_question,
    read_pieces,
    read_question,
)
from meshswarm.identity import Identity, PeerId
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

MODEL = b"m" * 32
SMALL, LARGE = Content(3_000_000, b"a" * 32), Content(MAX_HASHES * (1 << 20) + 5, b"b" * 32)
CONTENTS = (SMALL, LARGE)


@given(n_pieces=st.integers(1, 300), data=st.data())
def test_bit_fields_say_what_went_in(n_pieces: int, data: st.DataObject) -> None:
    pieces = data.draw(st.frozensets(st.integers(0, n_pieces - 1)))
    read = read_bits(pack_bits(pieces, n_pieces), n_pieces)
    assert (frozenset(range(n_pieces)) if read is None else read) == pieces


@pytest.mark.parametrize("value", [None, False, 1, "x", b"", b"\0\0\0", b"\x00\x01", [True]])
def test_a_bit_field_of_another_length_or_type_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        read_bits(value, 12)


def test_answers_survive_the_way() -> None:
    said = Pieces(4810, (frozenset({0, 5}), None), (Address("192.0.2.7", 6881), Address("2001:db8::1", 1)))
    assert read_pieces(pack_pieces(said, CONTENTS), CONTENTS) == said


def answer(*fields: object) -> bytes:
    packed: bytes = msgpack.packb([1, *fields])
    return packed


HALF = pack_bits(frozenset({0}), SMALL.n_pieces)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        answer(),
        msgpack.packb([2, 0, [True, True], []]),
        answer(-1, [True, True], []),
        answer(70_000, [True, True], []),
        answer(True, [True, True], []),
        answer(1, [True], []),
        answer(1, [True, True, True], []),
        answer(1, [HALF, HALF], []),
        answer(1, True, []),
        answer(1, [True, True], None),
        answer(1, [True, True], [[b"\x7f\0\0\1", 0]]),
        answer(1, [True, True], [[b"\x7f\0\0", 5]]),
        answer(1, [True, True], [["127.0.0.1", 5]]),
        answer(1, [True, True], [[b"\xe0\0\0\1", 5]]),  # a group's address
        answer(1, [True, True], [[b"\0\0\0\0", 5]]),
        answer(1, [True, True], [[b"\x0a\0\0\1", 5]] * (MAX_OTHERS + 1)),
        answer(1, [True, True], [[[[[[]]]]]]),
        bytes(MAX_PIECES_BYTES + 1),
    ],
)
def test_answers_that_cannot_be_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_pieces(data, CONTENTS)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(data: bytes) -> None:
    for read in (read_question, read_layer_question, lambda data: read_pieces(data, CONTENTS)):
        with pytest.raises(RemoteProtocolError):
            read(data)


@pytest.mark.parametrize(
    "fields",
    [(b"m" * 31, 0, 0, 1), (MODEL, -1, 0, 1), (MODEL, 0, 0, 0), (MODEL, 0, 0, MAX_HASHES + 1), (MODEL, 0, 2**40, 1),
     (MODEL, True, 0, 1), (MODEL, 0, 0.5, 1), (MODEL, 10**6, 0, 1)],
)  # fmt: skip
def test_questions_out_of_bounds_are_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        read_layer_question(answer(*fields))


def test_who_asks_hears_of_those_who_asked_before_and_of_nobody_else() -> None:
    askers, first, second = Askers(), Address("192.0.2.1", 1), Address("192.0.2.2", 2)
    one, other, third = PeerId(b"1" * 32), PeerId(b"2" * 32), PeerId(b"3" * 32)
    assert askers.asked(MODEL, one, first, 0.0) == ()
    assert askers.asked(b"x" * 32, other, second, 1.0) == ()
    assert askers.asked(MODEL, other, second, 2.0) == (first,)
    assert askers.asked(MODEL, other, second, 3.0) == (first,)
    assert askers.asked(MODEL, one, first, 4.0) == (second,)
    assert askers.asked(MODEL, third, Address("192.0.2.3", 3), 5.0 + OTHERS_FOR_S) == ()


def test_a_crowd_of_askers_takes_bounded_room() -> None:
    askers = Askers()
    for number in range(2 * MAX_ASKERS):
        address = Address(f"192.{number // 250}.{number % 250}.1", 9)
        others = askers.asked(MODEL, PeerId(number.to_bytes(32)), address, float(number) / 1e6)
    assert len(others) == MAX_OTHERS
    assert len(askers._seen) == MAX_ASKERS


def test_who_asks_often_and_under_many_names_is_not_all_that_others_are_told_of() -> None:
    askers, honest = Askers(), Address("198.51.100.7", 4811)
    askers.asked(MODEL, PeerId(b"h" * 32), honest, 0.0)
    for port in range(1, 300):
        askers.asked(MODEL, PeerId(b"a" * 32), Address("192.0.2.1", port), 1.0)
    assert askers.asked(MODEL, PeerId(b"v" * 32), Address("203.0.113.9", 1), 2.0) == (
        Address("192.0.2.1", 299),
        honest,
    )
    for number in range(200):
        askers.asked(MODEL, PeerId(number.to_bytes(32)), Address(f"192.0.2.{number}", 5), 3.0)
    told = askers.asked(MODEL, PeerId(b"w" * 32), Address("203.0.113.10", 1), 4.0)
    assert honest in told and len(told) == MAX_OF_ONE_NETWORK + 2


@dataclass
class Shelf:
    """Holds a small file in part and a large one whole."""

    torrent_port: int = 4810
    layers: tuple[bytes, ...] = field(
        default_factory=lambda: tuple(secrets.token_bytes(c.layer_bytes) for c in CONTENTS)
    )

    def contents(self, model_id: bytes) -> tuple[Content, ...] | None:
        return CONTENTS if model_id == MODEL else None

    def pieces(self, model_id: bytes) -> tuple[Bits, ...]:
        return (frozenset({1, 2}), None)

    def piece_layer(self, model_id: bytes, file: int) -> bytes:
        return self.layers[file]


@dataclass
class Scene:
    holder: Endpoint
    shelf: Shelf
    asker: Endpoint
    third: Endpoint

    async def from_asker(self) -> Connection:
        return await self.asker.dial(self.holder.peer_id, (self.holder.address,))

    async def from_third(self) -> Connection:
        return await self.third.dial(self.holder.peer_id, (self.holder.address,))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    ends = [await Endpoint.bind(Identity.generate(), Address("127.0.0.1", 0), swarm=swarm) for _ in range(3)]
    shelf = Shelf()
    Offer(ends[0], shelf)
    yield Scene(ends[0], shelf, ends[1], ends[2])
    for each in ends:
        await each.close()


async def test_a_holder_says_what_it_has_and_who_else_fetches(scene: Scene) -> None:
    connection = await scene.from_asker()
    said = await ask_pieces(connection, MODEL, CONTENTS, 7001)
    assert said == Pieces(4810, (frozenset({1, 2}), None))
    third = await ask_pieces(await scene.from_third(), MODEL, CONTENTS, 0)
    assert third.others == (), "who takes no pieces is told of nobody"
    third = await ask_pieces(await scene.from_third(), MODEL, CONTENTS, 7002)
    assert third.others == (Address("127.0.0.1", 7001),), "at the host it was seen at, whatever it claims"


async def test_a_model_that_is_not_shared_is_refused_in_good_order(scene: Scene) -> None:
    with pytest.raises(RefusedError):
        await ask_pieces(await scene.from_asker(), b"o" * 32, CONTENTS, 0)


async def test_a_long_piece_layer_comes_in_parts(scene: Scene) -> None:
    connection = await scene.from_asker()
    assert await ask_piece_layer(connection, MODEL, 1, LARGE) == scene.shelf.layers[1]
    assert await ask_piece_layer(connection, MODEL, 0, SMALL) == scene.shelf.layers[0]


async def test_questions_about_pieces_there_are_not_are_refused_and_the_holder_goes_on(scene: Scene) -> None:
    connection = await scene.from_asker()
    for question in (pack_layer_question(MODEL, 2, 0, 1), pack_layer_question(MODEL, 0, 5, MAX_HASHES), b"\0" * 40):
        with pytest.raises(RemoteProtocolError):
            await connection.request(LAYER_REQUEST, question, timeout_s=5, max_reply_bytes=MAX_LAYER_ANSWER_BYTES)
    with pytest.raises(RemoteProtocolError):
        await connection.request(PIECES_REQUEST, b"\x93", timeout_s=5, max_reply_bytes=100)
    assert (await ask_pieces(connection, MODEL, CONTENTS, 0)).torrent_port == 4810


async def test_a_layer_of_another_length_than_asked_for_is_refused(scene: Scene) -> None:
    async def short(peer: PeerId, question: bytes) -> bytes:
        return b"h" * 31

    scene.third.handle_request(LAYER_REQUEST, short, max_request_bytes=128, max_reply_bytes=100)
    connection = await scene.asker.dial(scene.third.peer_id, (scene.third.address,))
    with pytest.raises(RemoteProtocolError, match="hashes"):
        await ask_piece_layer(connection, MODEL, 0, SMALL)


def test_questions_survive_the_way() -> None:
    assert read_question(pack_question(MODEL, 5)) == (MODEL, 5)
    assert read_layer_question(pack_layer_question(MODEL, 3, 7, 9)) == (MODEL, 3, 7, 9)

"""Asking a holder what it has of a model's files, and for the hashes that its pieces are checked by.

The rule this file keeps: both sides are strangers. Every length is bounded before anything is made of it, addresses
that a holder passes on are those it saw itself, and a piece layer counts only when it leads to the file's root.

`model/pieces`: [1, model id, torrent port of the asker or 0] is answered by [1, torrent port, [pieces of each file],
[[host, torrent port] of others who asked lately]]. Pieces are `true` for all, else a bit field, the first piece in the
highest bit. `model/piece-layer`: [1, model id, file, first piece, number of pieces] is answered by the hashes.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from meshswarm.artifacts.header_proof import MAX_FILES
from meshswarm.artifacts.merkle import HASH_BYTES
from meshswarm.artifacts.torrent.content import Content
from meshswarm.config import Address, packed_host
from meshswarm.dht.networks import network_of
from meshswarm.errors import MeshswarmError, RefusedError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint

PIECES_REQUEST = "model/pieces"
LAYER_REQUEST = "model/piece-layer"
MAX_QUESTION_BYTES = 128
MAX_PIECES_BYTES = 2 << 20  # bit fields of 16 million pieces
MAX_HASHES = 16_384  # of a piece layer in one answer: 512 KiB
MAX_LAYER_ANSWER_BYTES = MAX_HASHES * HASH_BYTES
MAX_OTHERS = 16
MAX_OF_ONE_NETWORK = 4  # among them
OTHERS_FOR_S = 120.0
MAX_ASKERS = 256
TIMEOUT_S = 10.0
_VERSION = 1

Bits = frozenset[int] | None
"""Pieces of a file; None: all of them."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a peer has of a model: its torrent port (0: none), the pieces of each file, and where others are that fetch
    the same."""

    torrent_port: int
    files: tuple[Bits, ...]
    others: tuple[Address, ...] = ()


def pack_bits(pieces: Bits, n_pieces: int) -> bytes | bool:
    """`true` for all pieces, else the bit field."""
    if pieces is None or len(pieces) == n_pieces:
        return True
    field = bytearray(-(-n_pieces // 8))
    for piece in pieces:
        field[piece >> 3] |= 0x80 >> (piece & 7)
    return bytes(field)


def read_bits(value: Any, n_pieces: int) -> Bits:
    """Raises RemoteProtocolError for anything but a bit field of so many pieces."""
    if value is True:
        return None
    if type(value) is not bytes or len(value) != -(-n_pieces // 8):
        raise RemoteProtocolError(f"what is said to be held of a file is no bit field of {n_pieces} pieces")
    if n_pieces % 8 and value[-1] & (0xFF >> (n_pieces % 8)):
        raise RemoteProtocolError("a bit field says that pieces are held which there are not")
    return frozenset(8 * at + bit for at, byte in enumerate(value) if byte for bit in range(8) if byte & (0x80 >> bit))


def pack_pieces(held: Pieces, contents: Sequence[Content]) -> bytes:
    """The answer to `model/pieces`."""
    files = [pack_bits(bits, content.n_pieces) for bits, content in zip(held.files, contents, strict=True)]
    others = [[packed_host(each.host), each.port] for each in held.others if each.is_dialable]
    packed: bytes = msgpack.packb([_VERSION, held.torrent_port, files, others])
    return packed


def read_pieces(data: bytes, contents: Sequence[Content]) -> Pieces:
    """Raises RemoteProtocolError for anything but an answer about files of these contents."""
    fields = _array(data, MAX_PIECES_BYTES, 4, "an answer about pieces")
    _, port, files, others = fields
    if not _is_port(port, least=0) or not isinstance(files, list) or len(files) != len(contents):
        raise RemoteProtocolError("an answer about pieces is not about the model's files")
    bits = tuple(read_bits(value, content.n_pieces) for value, content in zip(files, contents, strict=True))
    if not isinstance(others, list) or len(others) > MAX_OTHERS:
        raise RemoteProtocolError("an answer about pieces names too many other peers, or none in a list")
    return Pieces(port, bits, tuple(_address(each) for each in others))


def pack_question(model_id: bytes, torrent_port: int) -> bytes:
    packed: bytes = msgpack.packb([_VERSION, model_id, torrent_port])
    return packed


def read_question(data: bytes) -> tuple[bytes, int]:
    """(model id, torrent port of the asker). Raises RemoteProtocolError."""
    _, model_id, port = _array(data, MAX_QUESTION_BYTES, 3, "a question about pieces")
    if type(model_id) is not bytes or len(model_id) != HASH_BYTES or not _is_port(port, least=0):
        raise RemoteProtocolError("a question about pieces names no model or no port")
    return model_id, port


def pack_layer_question(model_id: bytes, file: int, first: int, n_hashes: int) -> bytes:
    packed: bytes = msgpack.packb([_VERSION, model_id, file, first, n_hashes])
    return packed


def read_layer_question(data: bytes) -> tuple[bytes, int, int, int]:
    """(model id, file, first piece, number of pieces), each within what can be. Raises RemoteProtocolError."""
    _, model_id, *numbers = _array(data, MAX_QUESTION_BYTES, 5, "a question for a piece layer")
    if type(model_id) is not bytes or len(model_id) != HASH_BYTES or any(type(n) is not int for n in numbers):
        raise RemoteProtocolError("a question for a piece layer names no model or no pieces")
    file, first, n_hashes = numbers
    if not (0 <= file < MAX_FILES and 0 <= first < 1 << 32 and 1 <= n_hashes <= MAX_HASHES):
        raise RemoteProtocolError(f"at most {MAX_HASHES} hashes of one of a model's files are given at a time")
    return model_id, file, first, n_hashes


def _array(data: bytes, most_bytes: int, n_fields: int, what: str) -> list[Any]:
    if len(data) > most_bytes:
        raise RemoteProtocolError(f"{what} is longer than {most_bytes} bytes")
    try:
        fields = msgpack.unpackb(data, raw=False, max_array_len=MAX_FILES, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"{what} is malformed: {error}") from None
    if not isinstance(fields, list) or len(fields) != n_fields or type(fields[0]) is not int or fields[0] != _VERSION:
        raise RemoteProtocolError(f"{what} is malformed, or of a version not known here")
    return fields


def _is_port(value: Any, *, least: int = 1) -> bool:
    return type(value) is int and least <= value <= 65535


def _address(value: Any) -> Address:
    if not isinstance(value, list) or len(value) != 2 or not _is_port(value[1]):
        raise RemoteProtocolError("an answer about pieces names a peer without an address")
    host = value[0]
    if type(host) is not bytes or len(host) not in (4, 16):
        raise RemoteProtocolError("an answer about pieces names a host that is no IP address")
    address = Address(str(ipaddress.ip_address(host)), value[1])
    if not address.is_dialable:
        raise RemoteProtocolError("an answer about pieces names an address that is nobody's")
    return address


class Askers:
    """Who asked about a model lately and takes pieces too: they are told of one another, so that what one has already
    need not come from the seeder again. Each is in one place, and few are of one network: else whoever asks often, or
    under many names, would be all that others are told of. `now` in seconds on any clock."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, PeerId], tuple[Address, float]] = OrderedDict()

    def asked(self, model_id: bytes, peer: PeerId, address: Address, now: float) -> tuple[Address, ...]:
        """Notes who asks, and tells who else did."""
        others: list[Address] = []
        networks: Counter[bytes | None] = Counter()
        for (model, _), (other, at) in reversed(self._seen.items()):
            network = network_of(other)
            if model != model_id or other == address or other in others or now - at > OTHERS_FOR_S:
                continue
            if network is None or networks[network] < MAX_OF_ONE_NETWORK:
                networks[network] += 1
                others.append(other)
        key = model_id, peer
        self._seen[key] = address, now
        self._seen.move_to_end(key)
        while len(self._seen) > MAX_ASKERS:
            self._seen.popitem(last=False)
        return tuple(others[:MAX_OTHERS])


class Held(Protocol):
    """What this peer can tell of the models it shares."""

    @property
    def torrent_port(self) -> int: ...

    def contents(self, model_id: bytes) -> tuple[Content, ...] | None:
        """The files of a model that is shared here; None: it is not."""

    def pieces(self, model_id: bytes) -> tuple[Bits, ...]:
        """What is here of each of them."""

    def piece_layer(self, model_id: bytes, file: int) -> bytes:
        """The hashes of its pieces."""


class Offer:
    """Answers strangers' questions about what is `held`. `clock`: seconds."""

    def __init__(self, endpoint: Endpoint, held: Held) -> None:
        self._endpoint = endpoint
        self._held = held
        self._askers = Askers()
        endpoint.handle_request(
            PIECES_REQUEST, self._pieces, max_request_bytes=MAX_QUESTION_BYTES, max_reply_bytes=MAX_PIECES_BYTES
        )
        endpoint.handle_request(
            LAYER_REQUEST, self._layer, max_request_bytes=MAX_QUESTION_BYTES, max_reply_bytes=MAX_LAYER_ANSWER_BYTES
        )

    async def _pieces(self, peer: PeerId, question: bytes) -> bytes:
        model_id, port = read_question(question)
        contents = self._contents(model_id)
        others: tuple[Address, ...] = ()
        connection = self._endpoint.connection(peer)
        if port and connection is not None:  # where it is, was seen here: nobody can aim others at a third
            address = Address(connection.remote_address.host, port)
            others = self._askers.asked(model_id, peer, address, self._endpoint.loop.time())
        return pack_pieces(Pieces(self._held.torrent_port, self._held.pieces(model_id), others), contents)

    async def _layer(self, peer: PeerId, question: bytes) -> bytes:
        model_id, file, first, n_hashes = read_layer_question(question)
        contents = self._contents(model_id)
        if file >= len(contents) or first + n_hashes > contents[file].layer_bytes // HASH_BYTES:
            raise RemoteProtocolError("there are not so many pieces in the model's files", peer=str(peer))
        layer = self._held.piece_layer(model_id, file)
        return layer[first * HASH_BYTES : (first + n_hashes) * HASH_BYTES]

    def _contents(self, model_id: bytes) -> tuple[Content, ...]:
        contents = self._held.contents(model_id)
        if contents is None:
            raise RefusedError("this peer shares no files of that model", peer=str(self._endpoint.peer_id))
        return contents


async def ask_pieces(connection: Connection, model_id: bytes, contents: Sequence[Content], torrent_port: int) -> Pieces:
    """What a holder has. Raises MeshswarmError."""
    question = pack_question(model_id, torrent_port)
    answer = await connection.request(PIECES_REQUEST, question, timeout_s=TIMEOUT_S, max_reply_bytes=MAX_PIECES_BYTES)
    return read_pieces(answer, contents)


async def ask_piece_layer(connection: Connection, model_id: bytes, file: int, content: Content) -> bytes:
    """A file's piece layer, as long as it should be and not checked yet. Raises MeshswarmError."""
    layer = bytearray()
    n_pieces = content.layer_bytes // HASH_BYTES
    for first in range(0, n_pieces, MAX_HASHES):
        n_hashes = min(MAX_HASHES, n_pieces - first)
        part = await connection.request(
            LAYER_REQUEST,
            pack_layer_question(model_id, file, first, n_hashes),
            timeout_s=TIMEOUT_S,
            max_reply_bytes=MAX_LAYER_ANSWER_BYTES,
        )
        if len(part) != n_hashes * HASH_BYTES:
            raise RemoteProtocolError(
                f"peer {connection.peer_id.short} gave {len(part)} bytes for {n_hashes} hashes",
                peer=str(connection.peer_id),
            )
        layer += part
    return bytes(layer)


def in_words(errors: Iterable[MeshswarmError]) -> str:
    """Why nobody could be asked, shortly."""
    return "; ".join(dict.fromkeys(str(error) for error in errors))


def all_of(bits: Bits, content: Content) -> Collection[int]:
    """The pieces meant by `bits`."""
    return range(content.n_pieces) if bits is None else bits

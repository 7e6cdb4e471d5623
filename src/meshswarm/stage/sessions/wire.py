"""The bytes of session messages.

The rule this file keeps: whatever comes from another peer is checked here, field by field, before any other code sees
it, and a message that fails is a `RemoteProtocolError` with a sentence that names the field.

A frame is one msgpack array `[kind, field, ...]`; fields only ever get appended, and a reader ignores those it does
not know.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from meshswarm.config import Address
from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.span import MAX_LAYERS, Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import (
    MAX_DRAFT,
    MAX_FRAME_BYTES,
    MAX_ROWS_PER_STEP,
    MAX_TEXT,
    MAX_TOP_K,
    SESSION_ID_BYTES,
    Cancel,
    Close,
    Credit,
    Dtype,
    Failed,
    Fork,
    FullRow,
    FullRowRequest,
    Hop,
    Kind,
    Message,
    Open,
    Opened,
    Park,
    ReceiptAck,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Resume,
    Returns,
    Row,
    Step,
    Waiting,
)

_U32 = 2**32 - 1
_U64 = 2**64 - 1
_MAX_POSITIONS = 2**24
_MAX_MS = 2**40
_MAX_CHECKPOINTS = 1024
_MAX_TEMPERATURE = 1000.0


def _addresses(addresses: tuple[Address, ...]) -> list[list[Any]]:
    return [[address.host, address.port] for address in addresses]


def _key(peer: PeerId | None) -> bytes | None:
    return None if peer is None else peer.key


def _pack(*fields: Any) -> bytes:
    return msgpack.packb(fields, use_bin_type=True)  # type: ignore[no-any-return]


def encode(message: Message, identity: Identity | None = None) -> bytes:
    """The frame of a message. OPEN is signed, so it needs the head's `identity`."""
    match message:
        case Step():
            return _pack(
                Kind.STEP, message.seq, message.pos0, message.n_rows, message.truncate_to, message.flags,
                message.tokens, str(message.dtype), message.hidden, message.running_hash,
                message.n_outputs, message.turn, message.checkpoints,
            )  # fmt: skip
        case Result():
            rows = [[row.ids, row.logits, row.tail_log_mass] for row in message.rows]
            return _pack(Kind.RESULT, message.seq, rows, message.running_hash)
        case Credit():
            return _pack(Kind.CREDIT, message.rows)
        case Open():
            if identity is None:
                raise ValueError("an OPEN is signed: pass the head's identity")
            payload = _pack(
                message.session, message.head.key, _addresses(message.head_addresses), message.model_id,
                message.span.start, message.span.stop, message.n_layers, _key(message.previous), _key(message.next),
                _addresses(message.next_addresses), str(message.returns), str(message.dtype), message.n_ctx,
                str(message.profile), message.temperature, message.top_k, message.deadline_ms,
                message.max_wait_ms, None if message.fork is None else [message.fork.session, message.fork.n_positions],
            )  # fmt: skip
            return _pack(Kind.OPEN, payload, identity.sign("open", payload))
        case Opened():
            return _pack(
                Kind.OPENED, message.numclass, message.window, message.slice_root, message.rollback.value,
                message.needs_tokens, message.n_checkpoints,
            )  # fmt: skip
        case Waiting():
            return _pack(Kind.WAITING, message.place, message.estimate_ms)
        case Park():
            return _pack(Kind.PARK)
        case Resume():
            return _pack(Kind.RESUME, message.temperature, message.top_k, message.deadline_ms)
        case Refused():
            return _pack(Kind.REFUSED, str(message.reason), message.message[:MAX_TEXT], message.retry_after_ms)
        case Hop():
            return _pack(Kind.HOP, message.head.key, message.session)
        case FullRowRequest():
            return _pack(Kind.FULL_ROW_REQUEST, message.seq, message.row)
        case FullRow():
            return _pack(Kind.FULL_ROW, message.seq, message.logits, message.row)
        case Cancel():
            return _pack(Kind.CANCEL)
        case Close():
            return _pack(Kind.CLOSE)
        case ReceiptOffer():
            return _pack(Kind.RECEIPT, message.receipt)
        case ReceiptAck():
            return _pack(Kind.RECEIPT_ACK, message.acknowledgement)
        case Failed():
            return _pack(Kind.FAILED, message.message[:MAX_TEXT], _key(message.blamed))


# -- decoding

T = TypeVar("T")


class _Fields:
    """Takes the fields of one frame in order, each checked; every complaint names the message and the field."""

    def __init__(self, kind: str, values: list[Any]) -> None:
        self._kind = kind
        self._values = deque(values)

    def _complain(self, name: str, why: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"a {self._kind} message came with a bad {name}: {why}")

    def _take(self, name: str) -> Any:
        if not self._values:
            raise self._complain(name, "it is missing")
        return self._values.popleft()

    def integer(self, name: str, top: int = _U64) -> int:
        value = self._take(name)
        if type(value) is not int or not 0 <= value <= top:
            raise self._complain(name, f"not an integer from 0 to {top}")
        return value

    @property
    def is_at_end(self) -> bool:
        """Nothing is left: fields that earlier versions did not send are absent."""
        return not self._values

    def later_integer(self, name: str, top: int, missing: int) -> int:
        """A field that earlier versions did not send: `missing` stands for it then."""
        return missing if self.is_at_end else self.integer(name, top)

    def boolean(self, name: str) -> bool:
        value = self._take(name)
        if type(value) is not bool:
            raise self._complain(name, "neither true nor false")
        return value

    def optional_integer(self, name: str, top: int) -> int | None:
        value = self._take(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value <= top:
            raise self._complain(name, f"neither empty nor an integer from 0 to {top}")
        return value

    def real(self, name: str, low: float, high: float) -> float:
        value = self._take(name)
        if type(value) not in (int, float) or math.isnan(value) or not low <= value <= high:
            raise self._complain(name, f"not a number from {low} to {high}")
        return float(value)

    def data(self, name: str, exact: int | None = None, limit: int = MAX_FRAME_BYTES) -> bytes:
        value = self._take(name)
        if type(value) is not bytes or len(value) > limit or (exact is not None and len(value) != exact):
            raise self._complain(name, f"not {exact if exact is not None else 'at most ' + str(limit)} bytes")
        return value

    def optional_data(self, name: str, exact: int | None = None) -> bytes | None:
        value = self._take(name)
        if value is None:
            return None
        if type(value) is not bytes or (exact is not None and len(value) != exact):
            raise self._complain(name, "neither empty nor bytes of the right length")
        return value

    def text(self, name: str) -> str:
        value = self._take(name)
        if type(value) is not str or len(value) > MAX_TEXT:
            raise self._complain(name, f"not a text of at most {MAX_TEXT} characters")
        return value

    def choice(self, name: str, of: Callable[[str], T]) -> T:
        try:
            return of(self.text(name))
        except ValueError as error:
            raise self._complain(name, str(error)[:100]) from None

    def peer(self, name: str) -> PeerId:
        return PeerId(self.data(name, exact=32))

    def optional_peer(self, name: str) -> PeerId | None:
        raw = self.optional_data(name, exact=32)
        return None if raw is None else PeerId(raw)

    def items(self, name: str, limit: int) -> list[Any]:
        value = self._take(name)
        if type(value) is not list or len(value) > limit:
            raise self._complain(name, f"not a list of at most {limit}")
        return value

    def optional_items(self, name: str, limit: int) -> list[Any] | None:
        value = self._take(name)
        if value is None:
            return None
        if type(value) is not list or len(value) > limit:
            raise self._complain(name, f"neither empty nor a list of at most {limit}")
        return value

    def addresses(self, name: str) -> tuple[Address, ...]:
        found = []
        for item in self.items(name, 8):
            if type(item) is not list or len(item) != 2 or type(item[0]) is not str or type(item[1]) is not int:
                raise self._complain(name, "not host and port")
            try:
                address = Address(item[0], item[1])
            except ValueError as error:
                raise self._complain(name, str(error)) from None
            if not address.is_dialable:
                raise self._complain(name, "not one host's IP address with a port")
            found.append(address)
        return tuple(found)


def decode(frame: bytes) -> Message:
    """The message in a frame. Raises RemoteProtocolError, naming the field, for anything that is not allowed."""
    try:
        values = msgpack.unpackb(frame, raw=False, use_list=True)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"a session frame is not msgpack: {str(error)[:100]}") from None
    if type(values) is not list or not values or type(values[0]) is not int:
        raise RemoteProtocolError("a session frame is not a list that starts with its kind")
    try:
        kind = Kind(values[0])
    except ValueError:
        raise RemoteProtocolError(f"a session frame has the unknown kind {values[0]}") from None
    return _DECODERS[kind](_Fields(kind.name, values[1:]))


def _decode_open(fields: _Fields) -> Open:
    payload = fields.data("payload", limit=8192)
    signature = fields.data("signature", exact=64)
    try:
        values = msgpack.unpackb(payload, raw=False, use_list=True)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError):
        raise RemoteProtocolError("an OPEN message came with a payload that is not msgpack") from None
    if type(values) is not list:
        raise RemoteProtocolError("an OPEN message came with a payload that is not a list")
    inner = _Fields("OPEN", values)
    session = inner.data("session", exact=SESSION_ID_BYTES)
    head = inner.peer("head")
    if not head.verify("open", payload, signature):
        raise RemoteProtocolError("an OPEN message came with a signature that its head did not make", peer=str(head))
    head_addresses = inner.addresses("head_addresses")
    model_id = inner.data("model_id", exact=32)
    try:
        span = Span(inner.integer("start", _U32), inner.integer("stop", _U32))
    except ValueError as error:
        raise RemoteProtocolError(f"an OPEN message came with a bad span: {error}") from None
    return Open(
        session=session,
        head=head,
        head_addresses=head_addresses,
        model_id=model_id,
        span=span,
        n_layers=inner.integer("n_layers", MAX_LAYERS),
        previous=inner.optional_peer("previous"),
        next=inner.optional_peer("next"),
        next_addresses=inner.addresses("next_addresses"),
        returns=inner.choice("returns", Returns),
        dtype=inner.choice("dtype", Dtype),
        n_ctx=inner.integer("n_ctx", _MAX_POSITIONS),
        profile=inner.choice("profile", Profile),
        temperature=inner.real("temperature", 0.0, _MAX_TEMPERATURE),
        top_k=inner.integer("top_k", MAX_TOP_K),
        deadline_ms=inner.integer("deadline_ms", _MAX_MS),
        max_wait_ms=inner.later_integer("max_wait_ms", _MAX_MS, missing=0),
        fork=None if inner.is_at_end else _decode_fork(inner),
    )


def _decode_fork(fields: _Fields) -> Fork | None:
    items = fields.optional_items("fork", 2)
    if items is None:
        return None
    inner = _Fields("OPEN", items)
    return Fork(inner.data("fork's session", exact=SESSION_ID_BYTES), inner.integer("fork's length", _MAX_POSITIONS))


def _decode_opened(fields: _Fields) -> Opened:
    numclass, window = fields.text("numclass"), fields.integer("window", _U32)
    slice_root = fields.data("slice_root", exact=32)
    if fields.is_at_end:
        return Opened(numclass, window, slice_root)
    rollback, needs_tokens = fields.choice("rollback", Rollback), fields.boolean("needs_tokens")
    n_checkpoints = fields.later_integer("n_checkpoints", _MAX_CHECKPOINTS, missing=0)
    return Opened(numclass, window, slice_root, rollback, needs_tokens, n_checkpoints)


def _decode_step(fields: _Fields) -> Step:
    step = Step(
        seq=fields.integer("seq"),
        pos0=fields.integer("pos0", _MAX_POSITIONS),
        n_rows=fields.integer("n_rows", MAX_ROWS_PER_STEP),
        truncate_to=fields.optional_integer("truncate_to", _MAX_POSITIONS),
        flags=fields.integer("flags", 255),
        tokens=fields.optional_data("tokens"),
        dtype=fields.choice("dtype", Dtype),
        hidden=fields.optional_data("hidden"),
        running_hash=fields.optional_data("running_hash", exact=32),
        n_outputs=fields.later_integer("n_outputs", 1 + MAX_DRAFT, missing=1),
        turn=fields.later_integer("turn", _U32, missing=0),
        checkpoints=None if fields.is_at_end else _decode_checkpoints(fields),
    )
    if step.n_rows == 0:
        raise RemoteProtocolError("a STEP message came without rows")
    if not 1 <= step.n_outputs <= step.n_rows:
        raise RemoteProtocolError(f"a STEP message of {step.n_rows} rows asked for the logits of {step.n_outputs}")
    if step.tokens is None and step.hidden is None:
        raise RemoteProtocolError("a STEP message must carry tokens or hidden states")
    if step.tokens is not None and len(step.tokens) != 4 * step.n_rows:
        raise RemoteProtocolError("a STEP message came with another number of tokens than rows")
    return step


def _decode_checkpoints(fields: _Fields) -> tuple[int, ...] | None:
    items = fields.optional_items("checkpoints", _MAX_CHECKPOINTS)
    if items is None:
        return None
    inner = _Fields("STEP", items)
    return tuple(inner.integer("checkpoint", _MAX_POSITIONS) for _ in items)


def _decode_result(fields: _Fields) -> Result:
    seq = fields.integer("seq")
    rows = []
    for item in fields.items("rows", MAX_ROWS_PER_STEP):
        if type(item) is not list:
            raise RemoteProtocolError("a RESULT message came with a row that is not a list")
        inner = _Fields("RESULT", item)
        row = Row(
            inner.data("ids", limit=4 * MAX_TOP_K),
            inner.data("logits", limit=4 * MAX_TOP_K),
            inner.real("tail_log_mass", -math.inf, 1e9),
        )
        if len(row.ids) != len(row.logits) or not row.ids or len(row.ids) % 4:
            raise RemoteProtocolError("a RESULT message came with ids and logits that do not match")
        rows.append(row)
    return Result(seq, tuple(rows), fields.optional_data("running_hash", exact=32))


def _decode_full_row(fields: _Fields) -> FullRow:
    full = FullRow(fields.integer("seq"), fields.data("logits"), fields.later_integer("row", MAX_DRAFT, missing=0))
    if not full.logits or len(full.logits) % 4:
        raise RemoteProtocolError("a FULL_ROW message came with logits that are no whole number of floats")
    return full


_DECODERS: dict[Kind, Callable[[_Fields], Message]] = {
    Kind.OPEN: _decode_open,
    Kind.OPENED: _decode_opened,
    Kind.REFUSED: lambda f: Refused(
        f.choice("reason", RefusalReason), f.text("message"), f.integer("retry_after_ms", _U32)
    ),
    Kind.WAITING: lambda f: Waiting(f.integer("place", _U32), f.integer("estimate_ms", _MAX_MS)),
    Kind.PARK: lambda f: Park(),
    Kind.RESUME: lambda f: Resume(
        f.real("temperature", 0.0, _MAX_TEMPERATURE), f.integer("top_k", MAX_TOP_K), f.integer("deadline_ms", _MAX_MS)
    ),
    Kind.HOP: lambda f: Hop(f.peer("head"), f.data("session", exact=SESSION_ID_BYTES)),
    Kind.STEP: _decode_step,
    Kind.RESULT: _decode_result,
    Kind.CREDIT: lambda f: Credit(f.integer("rows")),
    Kind.FULL_ROW_REQUEST: lambda f: FullRowRequest(f.integer("seq"), f.later_integer("row", MAX_DRAFT, missing=0)),
    Kind.FULL_ROW: _decode_full_row,
    Kind.CANCEL: lambda f: Cancel(),
    Kind.CLOSE: lambda f: Close(),
    Kind.RECEIPT: lambda f: ReceiptOffer(f.data("receipt", limit=8192)),
    Kind.RECEIPT_ACK: lambda f: ReceiptAck(f.data("acknowledgement", limit=8192)),
    Kind.FAILED: lambda f: Failed(f.text("message"), f.optional_peer("blamed")),
}

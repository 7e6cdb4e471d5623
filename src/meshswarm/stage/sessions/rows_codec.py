"""Hidden states as bytes and back, in each wire dtype.

The rule this file keeps: a row's bytes depend on that row alone, a row is `row_bytes(dtype, width)` long in any company
(so a log of rows can be cut between them), and a value the dtype cannot hold is refused, never clamped or turned into
infinity: an answer from other numbers than the model's own would look like any other answer.

All little-endian. F32: as computed, exact. F16: IEEE half precision. Q8: per row, first one float32 scale for each
block of 32 values (the last block may be shorter), then one int8 a value; the value is scale * int8. Scales are
float32 because a half's range would flush small blocks to zero; they cost 4 bytes in 36.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshswarm.errors import LocalError, RemoteProtocolError
from meshswarm.stage.sessions.messages import Dtype

F16_MAX = 65504.0  # the largest finite IEEE half
BLOCK = 32
_TOP = 127
_MAX_SCALE = np.nextafter(np.float32(np.finfo(np.float32).max / _TOP), np.float32(0))


class RowsDoNotFitError(LocalError):
    """Rows were computed that the session's wire dtype cannot hold. In F32 they can be sent."""


def row_bytes(dtype: Dtype, width: int) -> int:
    """Bytes of one row of `width` values."""
    match dtype:
        case Dtype.F32:
            return 4 * width
        case Dtype.F16:
            return 2 * width
        case Dtype.Q8:
            return 4 * _n_blocks(width) + width


def encode_rows(rows: NDArray[np.float32], dtype: Dtype) -> bytes:
    """The bytes of `rows`: float32 [n_rows, width]. Raises RowsDoNotFitError for what `dtype` cannot hold."""
    match dtype:
        case Dtype.F32:
            return rows.astype("<f4", copy=False).tobytes()
        case Dtype.F16:
            _check_top(rows, F16_MAX, dtype)
            return rows.astype("<f2").tobytes()
        case Dtype.Q8:
            return _encode_q8(rows)


def decode_rows(data: bytes, dtype: Dtype, n_rows: int, width: int) -> NDArray[np.float32]:
    """The rows in `data`, which another peer sent: finite float32 [n_rows, width], read-only in F32 (no copy is made).

    Raises RemoteProtocolError for a wrong length and for values that are no finite numbers.
    """
    expected = n_rows * row_bytes(dtype, width)
    if len(data) != expected:
        raise RemoteProtocolError(
            f"{n_rows} rows of width {width} in {dtype} came as {len(data)} bytes instead of {expected}"
        )
    match dtype:
        case Dtype.F32:
            rows = np.frombuffer(data, "<f4").reshape(n_rows, width).astype(np.float32, copy=False)
        case Dtype.F16:
            rows = np.frombuffer(data, "<f2").reshape(n_rows, width).astype(np.float32)
        case Dtype.Q8:
            rows = _decode_q8(data, n_rows, width)
    if not np.isfinite(rows).all():
        raise RemoteProtocolError(f"rows came in {dtype} with a value that is not a finite number")
    return rows


def over_the_wire(rows: NDArray[np.float32], dtype: Dtype) -> NDArray[np.float32]:
    """What the receiver of `rows` gets. Raises RowsDoNotFitError for what `dtype` cannot hold."""
    return decode_rows(encode_rows(rows, dtype), dtype, *rows.shape)


def _n_blocks(width: int) -> int:
    return -(-width // BLOCK)


def _check_top(rows: NDArray[np.float32], top: float, dtype: Dtype) -> None:
    highest, lowest = (float(rows.max()), float(rows.min())) if rows.size else (0.0, 0.0)
    if not (highest <= top and lowest >= -top):  # so that NaN fails
        worst = highest if not highest <= -lowest else lowest
        raise RowsDoNotFitError(
            f"a hidden state of {worst:g} does not fit the wire dtype {dtype}, which ends at {top:g}; use f32"
        )


def _encode_q8(rows: NDArray[np.float32]) -> bytes:
    n_rows, width = rows.shape
    _check_top(rows, float(np.finfo(np.float32).max), Dtype.Q8)
    n_blocks = _n_blocks(width)
    padded = np.zeros((n_rows, n_blocks * BLOCK), np.float32)
    padded[:, :width] = rows
    blocks = padded.reshape(n_rows, n_blocks, BLOCK)
    scales = np.minimum(np.abs(blocks).max(axis=2) / np.float32(_TOP), _MAX_SCALE)
    divisors = np.where(scales > 0, scales, np.float32(1))  # a block of zeros, or of less than any scale can say
    quants = np.clip(np.rint(blocks / divisors[:, :, None]), -_TOP, _TOP).astype(np.int8)
    out = np.empty((n_rows, row_bytes(Dtype.Q8, width)), np.uint8)
    out[:, : 4 * n_blocks] = scales.astype("<f4", copy=False).view(np.uint8)
    out[:, 4 * n_blocks :] = quants.reshape(n_rows, -1)[:, :width].view(np.uint8)
    return out.tobytes()


def _decode_q8(data: bytes, n_rows: int, width: int) -> NDArray[np.float32]:
    n_blocks = _n_blocks(width)
    raw = np.frombuffer(data, np.uint8).reshape(n_rows, row_bytes(Dtype.Q8, width))
    scales = np.ascontiguousarray(raw[:, : 4 * n_blocks]).view("<f4").astype(np.float32, copy=False)
    if not ((scales >= 0) & (scales <= _MAX_SCALE)).all():
        raise RemoteProtocolError("rows came in q8 with a block's scale that is no finite, positive number")
    quants = np.zeros((n_rows, n_blocks * BLOCK), np.float32)
    quants[:, :width] = raw[:, 4 * n_blocks :].view(np.int8)
    values = quants.reshape(n_rows, n_blocks, BLOCK) * scales[:, :, None]
    return np.ascontiguousarray(values.reshape(n_rows, -1)[:, :width])

"""Hidden states as bytes: what arrives is what was sent, as near as the dtype says, and nothing malformed gets in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshswarm.errors import RemoteProtocolError
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.sessions.rows_codec import (
    BLOCK,
    F16_MAX,
    RowsDoNotFitError,
    decode_rows,
    encode_rows,
    over_the_wire,
    row_bytes,
)

MAX = float(np.finfo(np.float32).max)


def rows_of(limit: float):
    shapes = st.tuples(st.integers(1, 5), st.integers(1, 100))
    return shapes.flatmap(
        lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-limit, limit, width=32), fill=st.nothing())
    )


@given(rows_of(MAX))
def test_f32_is_bit_identical(rows):
    assert over_the_wire(rows, Dtype.F32).tobytes() == rows.tobytes()


def test_f32_is_read_without_a_copy():
    data = encode_rows(np.ones((2, 3), np.float32), Dtype.F32)
    assert np.shares_memory(decode_rows(data, Dtype.F32, 2, 3), np.frombuffer(data, np.uint8))


@given(rows_of(F16_MAX))
def test_f16_is_the_nearest_half(rows):
    arrived = over_the_wire(rows, Dtype.F16)
    assert (np.abs(arrived - rows) <= np.maximum(np.abs(rows) * 2**-11, 2**-25)).all()


@given(rows_of(MAX))
def test_q8_is_within_half_a_step_of_its_block(rows):
    arrived = over_the_wire(rows, Dtype.Q8)
    width = rows.shape[1]
    for start in range(0, width, BLOCK):
        block = rows[:, start : start + BLOCK].astype(np.float64)
        step = np.abs(block).max(axis=1, keepdims=True) / 127
        error = np.abs(arrived[:, start : start + BLOCK] - block)
        # Beside the half step: rounding of the scale, and of scales too small for a normal number.
        assert (error <= step * (0.5 + 1e-4) + 127 * 2.0**-149).all()


@given(rows_of(1000.0), st.sampled_from(Dtype))
def test_a_row_has_the_same_bytes_in_any_company(rows, dtype):
    data = encode_rows(rows, dtype)
    length = row_bytes(dtype, rows.shape[1])
    assert len(data) == length * len(rows)
    for index, row in enumerate(rows):
        assert data[index * length : (index + 1) * length] == encode_rows(row[None], dtype)


@given(rows_of(1000.0), st.sampled_from(Dtype))
def test_sending_on_what_arrived_changes_nothing(rows, dtype):
    """A replay sends what the log kept, and a relay what it got: both are the same rows again."""
    arrived = over_the_wire(rows, dtype)
    assert np.allclose(over_the_wire(arrived, dtype), arrived, rtol=1e-6)


@pytest.mark.parametrize("value", [65520.0, -70000.0, np.inf, -np.inf, np.nan])
def test_f16_refuses_what_it_cannot_hold(value):
    rows = np.zeros((2, 40), np.float32)
    rows[1, 7] = value
    with pytest.raises(RowsDoNotFitError, match="f16"):
        encode_rows(rows, Dtype.F16)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_q8_refuses_what_is_no_number(value):
    with pytest.raises(RowsDoNotFitError, match="q8"):
        encode_rows(np.full((1, 3), value, np.float32), Dtype.Q8)


def test_rows_that_are_not_contiguous_are_sent_as_they_read():
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::2]
    assert np.array_equal(over_the_wire(rows, Dtype.F32), rows)
    assert np.array_equal(over_the_wire(rows, Dtype.F16), rows)


@given(st.binary(max_size=400), st.sampled_from(Dtype), st.integers(1, 4), st.integers(1, 70))
def test_hostile_bytes_give_finite_rows_or_are_refused(data, dtype, n_rows, width):
    try:
        rows = decode_rows(data, dtype, n_rows, width)
    except RemoteProtocolError:
        return
    assert rows.shape == (n_rows, width) and rows.dtype == np.float32 and np.isfinite(rows).all()


@given(st.data(), st.sampled_from(Dtype), st.integers(1, 3), st.integers(1, 70))
def test_hostile_bytes_of_the_right_length_too(data, dtype, n_rows, width):
    length = n_rows * row_bytes(dtype, width)
    raw = data.draw(st.binary(min_size=length, max_size=length))
    try:
        assert np.isfinite(decode_rows(raw, dtype, n_rows, width)).all()
    except RemoteProtocolError as error:
        assert str(dtype) in str(error)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, MAX])
def test_a_scale_that_makes_no_number_is_refused(scale):
    data = np.array([scale], "<f4").tobytes() + bytes([127]) * 32
    with pytest.raises(RemoteProtocolError, match="scale"):
        decode_rows(data, Dtype.Q8, 1, 32)


def test_the_sizes_are_what_the_protocol_says():
    assert [row_bytes(dtype, 576) for dtype in Dtype] == [2304, 1152, 648]
    assert row_bytes(Dtype.Q8, 33) == 2 * 4 + 33

"""Ranges of layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.span import Span, missing_layers

spans = st.tuples(st.integers(0, 39), st.integers(1, 20)).map(lambda p: Span(p[0], min(40, p[0] + p[1])))


def test_text_and_length() -> None:
    assert Span.parse("10:20") == Span(10, 20)
    assert str(Span(10, 20)) == "10:20"
    assert len(Span(10, 20)) == 10
    assert 19 in Span(10, 20)
    assert 20 not in Span(10, 20)


@pytest.mark.parametrize("text", ["", "5", "5:5", "6:5", "-1:5", "0:1000000", "a:b", "0:10:20"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a range of layers"):
        Span.parse(text)


@given(st.lists(spans, max_size=8))
def test_missing_layers_are_exactly_those_no_span_covers(covered: list[Span]) -> None:
    missing = missing_layers(covered, 40)
    named = {layer for gap in missing for layer in range(gap.start, gap.stop)}
    assert named == {layer for layer in range(40) if not any(layer in span for span in covered)}
    assert list(missing) == sorted(missing)

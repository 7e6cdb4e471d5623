"""Which layers a peer takes."""

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.routing.placement import choose_span
from meshswarm.span import Span


def test_the_whole_model_when_it_fits() -> None:
    assert choose_span([10] * 30, 50, 350, [Span(0, 30)]) == Span(0, 30)


def test_the_layers_nobody_holds_when_it_does_not() -> None:
    assert choose_span([10] * 30, 50, 150, [Span(0, 10), Span(20, 30)]) == Span(10, 20)


def test_nothing_when_not_even_one_layer_fits() -> None:
    assert choose_span([10] * 30, 50, 59, []) is None


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(0, 200))
def test_the_choice_always_fits_and_cannot_be_longer(layer_bytes: list[int], memory: int) -> None:
    span = choose_span(layer_bytes, 0, memory, [])
    costs = {
        (start, stop): sum(layer_bytes[start:stop])
        for start in range(len(layer_bytes))
        for stop in range(start + 1, len(layer_bytes) + 1)
    }
    fitting = [stop - start for (start, stop), cost in costs.items() if cost <= memory]
    assert (span is None) == (not fitting)
    if span is not None:
        assert costs[span.start, span.stop] <= memory
        assert len(span) == max(fitting)

"""Which layers a peer takes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.routing.placement import choose_span
from meshswarm.span import Span, missing_layers
from meshswarm.stage.sizes.memory import Load, MemoryModel

LOAD = Load(n_ctx=1023, n_sessions=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MemoryModel]:
    """Models of 12 layers: one that may be cut anywhere, and one only before each fourth layer."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    return {
        name: MemoryModel(read_header(write_tiny(name, folder / f"{name}.gguf", n_layers=12)), LOAD)
        for name in ("qwen3", "smollm3")
    }


def legal_spans(model: MemoryModel) -> list[Span]:
    ends = [*model.cuts.starts, model.n_layers]
    return [Span(start, stop) for start in ends for stop in ends if start < stop]


def test_the_whole_model_when_it_fits(models: dict[str, MemoryModel]) -> None:
    model = models["qwen3"]
    whole = model.span(model.whole).total
    assert choose_span(model, whole, [model.whole]) == model.whole
    assert choose_span(model, whole - 1, []) != model.whole


def test_the_layers_nobody_holds_when_it_does_not(models: dict[str, MemoryModel]) -> None:
    model = models["qwen3"]
    room = max(model.span(Span(start, start + 4)).total for start in (0, 4, 8))
    chosen = choose_span(model, room, [Span(0, 4), Span(8, 12)])
    assert chosen is not None
    assert chosen.start <= 4 and chosen.stop >= 8


@pytest.mark.parametrize("extra", [0, 10**6])
@pytest.mark.parametrize("name", ["qwen3", "smollm3"])
def test_peers_that_come_one_by_one_cover_the_model(name: str, extra: int, models: dict[str, MemoryModel]) -> None:
    """Its ends too, which take more memory than the layers between them."""
    model = models[name]
    room = max(model.span(span).total for span in model.smallest_spans) + extra
    held: list[Span] = []
    for _ in model.smallest_spans:
        chosen = choose_span(model, room, held)
        assert chosen is not None
        held.append(chosen)
    assert missing_layers(held, model.n_layers) == ()


def test_nothing_when_not_even_one_layer_fits(models: dict[str, MemoryModel]) -> None:
    least = min(models["qwen3"].span(span).total for span in legal_spans(models["qwen3"]))
    assert choose_span(models["qwen3"], least - 1, []) is None


@pytest.mark.parametrize("name", ["qwen3", "smollm3"])
@given(share=st.floats(0, 1.1), held=st.lists(st.sampled_from([Span(0, 4), Span(4, 12), Span(3, 9)]), max_size=3))
@settings(max_examples=50)
def test_the_choice_is_legal_and_fits_and_could_not_be_longer(
    name: str, share: float, held: list[Span], models: dict[str, MemoryModel]
) -> None:
    model = models[name]
    costs = {span: model.span(span).total for span in legal_spans(model)}
    room = min(costs.values()) + int(share * (max(costs.values()) - min(costs.values()))) - 1
    chosen = choose_span(model, room, held)
    assert (chosen is None) == all(cost > room for cost in costs.values())
    if chosen is not None:
        assert costs[chosen] <= room
        assert not any(span.start == chosen.start and span.stop > chosen.stop for span in costs if costs[span] <= room)

"""Where models may be cut and what slices are padded with, read off headers; refusals name what stands against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stage.tiny_models import TINY, write_tiny

from meshswarm.artifacts.gguf.check import GgufHeader, parse_header, read_header
from meshswarm.artifacts.gguf.container import ValueType
from meshswarm.span import Span
from meshswarm.stage.families.cuts import IllegalCutError, check_cut, legal_cuts, slice_pads
from meshswarm.stage.families.proofs import PROVED_BUILDS, CutProof, Proofs, installed_build, note
from meshswarm.stage.families.table import FAMILIES, KNOWN_OBSTACLES

REQUIRED = {
    "llama",
    "mistral3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "gemma2",
    "gemma3",
    "phi3",
    "glm4",
    "glm4moe",
    "glm-dsa",
    "deepseek2",
    "deepseek32",
    "deepseek4",
    "gpt-oss",
    "granite",
    "granitehybrid",
    "olmo2",
    "cohere2",
    "lfm2",
    "nemotron_h",
    "minimax-m2",
    "llama4",
    "smollm3",
}
WITH_ROPE_FACTORS = r".*[._]scale|.*\.bias"
Tiny = Callable[..., GgufHeader]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """`tiny(name, **changes)`: the header of a tiny model."""
    return lambda name, **changes: read_header(write_tiny(name, tmp_path / "model.gguf", **changes))


def llama(recipe: Any, architecture: str = "llama", **entries: tuple[Any, ...]) -> GgufHeader:
    """The header of a tiny llama model under another name, with more settings."""
    recipe.entries["general.architecture"] = (ValueType.STRING, architecture)
    for key in [key for key in recipe.entries if key.startswith("llama.")]:
        recipe.entries[architecture + key.removeprefix("llama")] = recipe.entries.pop(key)
    recipe.entries |= {key.replace("__", "."): value for key, value in entries.items()}
    return parse_header(recipe.header(), recipe.file_length, source="crafted.gguf")


def test_every_architecture_that_users_ask_for_has_a_row_and_a_tiny_model() -> None:
    assert set(FAMILIES) >= REQUIRED
    assert {model.architecture for model in TINY.values()} == set(FAMILIES)
    assert not set(FAMILIES) & set(KNOWN_OBSTACLES)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek2", "glm4moe", "qwen35moe"])
def test_most_models_can_be_cut_between_any_two_layers(tiny: Tiny, name: str) -> None:
    cuts = legal_cuts(tiny(name))
    assert cuts.refusal is None and cuts.starts == tuple(range(cuts.n_layers))
    assert cuts.sentence == f"can be cut between any two of its {cuts.n_layers} layers"


@pytest.mark.parametrize(
    ("name", "keys", "starts"),
    [
        ("smollm3", {}, (0, 4, 8)),
        ("llama4", {}, (0, 4, 8)),
        ("llama4", {"interleave_moe_layer_step": 3}, (0,)),
        ("glm-dsa", {}, (0, 2, 3, 5)),
        ("glm-dsa", {"attention.indexer.types": None, "context_length": 1 << 20}, (0, 1, 2)),
        ("deepseek4", {}, (0, 1, 2, 3, 4, 5, 6)),
        ("deepseek4", {"attention.compress_ratios": [4, 0, 128, 0, 128, 4, 128, 0]}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_some_can_be_cut_at_their_periods_only(
    tiny: Tiny, name: str, keys: dict[str, Any], starts: tuple[int, ...]
) -> None:
    header = tiny(name, keys=keys)
    cuts = legal_cuts(header)
    assert cuts.starts == starts
    assert cuts.allow(Span(0, cuts.n_layers))
    for start in range(cuts.n_layers):
        for stop in range(start + 1, cuts.n_layers + 1):
            span = Span(start, stop)
            is_legal = start in starts and stop in {*starts, cuts.n_layers}
            assert cuts.allow(span) is is_legal
            if not is_legal:
                with pytest.raises(IllegalCutError, match=rf"layers {span} cannot be served alone: this model can be"):
                    check_cut(header, span)


def test_a_sentence_says_where(tiny: Tiny) -> None:
    period = "llama.cpp counts a period of {} layers from the first one it has"
    assert legal_cuts(tiny("smollm3")).sentence == f"can be cut before 4, 8 of its layers 0:12: {period.format(4)}"
    nowhere = tiny("llama4", keys={"interleave_moe_layer_step": 3})
    assert not legal_cuts(nowhere).is_whole_apart
    assert legal_cuts(nowhere).sentence == f"can be cut nowhere in its 12 layers: {period.format(12)}"
    sparse = "can be cut before 2, 3, 5 of its layers 0:6: a span starts at a layer with an indexer of its own"
    assert legal_cuts(tiny("glm-dsa")).sentence == sparse
    assert legal_cuts(tiny("deepseek4")).sentence.endswith(
        "0:8: the last span holds a layer of attention compressed by 4"
    )
    with pytest.raises(IllegalCutError, match="the layers 2:4 cannot be served alone: this model can be cut before 4"):
        check_cut(tiny("smollm3"), Span(2, 4))


def test_the_whole_model_is_no_cut(tiny: Tiny, gguf_recipe: Any) -> None:
    assert check_cut(tiny("smollm3"), Span(0, 12)) is None
    assert check_cut(llama(gguf_recipe(), "some-arch"), Span(0, 4)) is None
    with pytest.raises(IllegalCutError, match="the layers 0:5 are outside the model, which has the layers 0:4"):
        check_cut(llama(gguf_recipe(), "some-arch"), Span(0, 5))


def test_blocks_that_guess_further_tokens_are_not_served(tiny: Tiny) -> None:
    header = tiny("glm4moe")
    assert header.scalar("glm4moe.block_count") == 7
    assert check_cut(header, Span(0, 6)) is None
    with pytest.raises(IllegalCutError, match="which has the layers 0:6"):
        check_cut(header, Span(3, 7))


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("some-arch", r"no test has proved yet that they can be split exactly \(proved: .*llama.*\)"),
        ("gemma3n", "every layer reads an embedding of the tokens of its own"),
        ("gemma4", "every layer reads an embedding of the tokens of its own"),
        ("rwkv7", "every layer reads the values of the first layer"),
        ("kimi-k3", "its layers attend to the residuals of earlier layers"),
    ],
)
def test_what_is_not_proved_is_served_whole_and_the_refusal_says_why(
    gguf_recipe: Any, architecture: str, why: str
) -> None:
    header = llama(gguf_recipe(), architecture)
    whole = rf"models of the architecture '{architecture}' are served whole \(layers 0:4\), because "
    with pytest.raises(IllegalCutError, match="the layers 0:2 cannot be served alone: " + whole + why):
        check_cut(header, Span(0, 2))
    cuts = legal_cuts(header)
    assert cuts.starts == (0,) and cuts.sentence == cuts.refusal
    assert cuts.allow(Span(0, 4)) and not cuts.allow(Span(0, 2))


def test_parts_of_a_model_with_factors_by_context_have_small_contexts(tiny: Tiny) -> None:
    plain, bent = legal_cuts(tiny("phi3")), legal_cuts(tiny("phi3", without=WITH_ROPE_FACTORS))
    assert (plain.max_ctx, bent.max_ctx) == (None, 64)
    assert bent.sentence.endswith("any two of its 4 layers; a session in parts of it has at most 64 positions")
    assert not plain.is_whole_apart and bent.is_whole_apart, (
        "a peer with the whole takes the factors of its own context"
    )
    keys = {"rope.scaling.original_context_length": None}
    assert legal_cuts(tiny("phi3", without=WITH_ROPE_FACTORS, keys=keys)).max_ctx == 512


def test_another_build_of_llama_cpp_needs_a_proof_of_its_own(gguf_recipe: Any, tmp_path: Path) -> None:
    header = llama(gguf_recipe())
    elsewhere = Proofs("9.9.9")
    with pytest.raises(IllegalCutError, match=r"proved with llama-cpp-python 0\.3\.36 and this is 9\.9\.9; `meshswarm"):
        check_cut(header, Span(0, 2), elsewhere)
    assert check_cut(header, Span(0, 4), elsewhere) is None
    assert check_cut(header, Span(0, 2), Proofs("9.9.9", CutProof("cpu-1", (0, 2)))) is not None
    with pytest.raises(
        IllegalCutError, match=r"cut before 2 of its layers 0:4: with llama-cpp-python 9\.9\.9 no other"
    ):
        check_cut(header, Span(0, 1), Proofs("9.9.9", CutProof("cpu-1", (0, 2))))


def test_what_was_tried_here_never_allows_more_than_the_table_does(tiny: Tiny) -> None:
    header = tiny("smollm3")
    assert legal_cuts(header, Proofs("9.9.9", CutProof("cpu-1", (0, 2, 8)))).starts == (0, 8)
    assert legal_cuts(header, Proofs("9.9.9", CutProof("cpu-1", (0, 8), max_ctx=200))).max_ctx == 200
    assert legal_cuts(header, Proofs(installed_build(), CutProof("cpu-1", (0, 8)))).starts == (0, 4, 8)
    bent = tiny("phi3", without=WITH_ROPE_FACTORS)
    assert legal_cuts(bent, Proofs("9.9.9", CutProof("cpu-1", (0, 1), max_ctx=200))).max_ctx == 64


def test_a_model_whose_parts_differ_is_served_whole_on_every_build(tiny: Tiny) -> None:
    header = tiny("llama")
    for build in (installed_build(), "9.9.9"):
        cuts = legal_cuts(header, Proofs(build, CutProof("cpu-1", refusal="a logit differs by 1")))
        assert cuts.refusal is not None and cuts.is_whole_apart
        assert cuts.sentence == (
            "this model is served whole (layers 0:4) on this machine, because `meshswarm models prove` found with "
            f"llama-cpp-python {build} that a logit differs by 1"
        )
        assert cuts.allow(Span(0, 4)) and not cuts.allow(Span(0, 2))


def test_a_proof_on_disk_is_for_its_model_its_build_and_its_numclass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed_build() in PROVED_BUILDS, "run the parity tests on this build, then list it"
    folder, model, other = tmp_path / "proofs", bytes(32), bytes(31) + b"1"
    proved = CutProof("cpu-1", (0, 2), max_ctx=300)
    refuted = CutProof("cpu-1", refusal="a logit differs by 1")
    note(folder, model, refuted)
    monkeypatch.setattr("meshswarm.stage.families.proofs.installed_build", lambda: "9.9.9")
    assert Proofs.here(folder, model, "cpu-1") == Proofs("9.9.9")
    note(folder, model, proved)
    note(folder, other, refuted)
    assert Proofs.here(folder, model, "cpu-1") == Proofs("9.9.9", proved)
    assert Proofs.here(folder, model, "cpu-2") == Proofs("9.9.9"), "another processor, or other options"
    assert Proofs.here(folder, other, "cpu-2") == Proofs("9.9.9", refuted), "not worth another try"
    monkeypatch.undo()
    assert Proofs.here(folder, model, "cpu-1") == Proofs(installed_build(), refuted), "what each build was found to do"
    note(folder, model, proved)
    assert not Proofs.here(folder, model, "cpu-1").is_refuted, "a later proof takes its place"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 0}', '{"format": 1, "model_id": "x", "builds": {}}', "{builds}"]
)
def test_a_damaged_proof_proves_nothing(tmp_path: Path, text: str) -> None:
    note(tmp_path, bytes(32), CutProof("cpu-1", (0, 2)))
    (path,) = tmp_path.iterdir()
    known = path.read_text()
    path.write_text(text.replace("{builds}", known.replace("[0,", '["x",').replace("[\n", '["x",\n')))
    assert Proofs.here(tmp_path, bytes(32), "cpu-1").found is None


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"llama__some__key": (ValueType.UINT32, 1)}, r"its setting llama\.some\.key means"),
        ({"llama__attention__sliding_window": (ValueType.UINT32, 8)}, r"its setting llama\.attention\.sliding_window"),
        ({"llama__rope__scaling__type": (ValueType.STRING, "longrope")}, r"'longrope' as its setting llama\.rope"),
        ({"general__tensor_extra__name": (ValueType.STRING, "x")}, r"its setting general\.tensor_extra\.name means"),
    ],
)
def test_a_setting_that_its_row_does_not_list_is_named(gguf_recipe: Any, entries: dict[str, Any], what: str) -> None:
    refusal = legal_cuts(llama(gguf_recipe(), **entries)).refusal
    assert refusal is not None
    with pytest.raises(IllegalCutError, match=what):
        check_cut(llama(gguf_recipe(), **entries), Span(0, 2))


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("qwen3", {"without": "none"}, r"its tensor cls(\.output)?\.weight"),
        ("llama4", {"keys": {"attention.sliding_window": 0}}, r"its setting llama4\.attention\.sliding_window means"),
        ("granite", {"keys": {"deepstack_mapping": [1, 2, 3, 4]}}, r"its setting granite\.deepstack_mapping means"),
    ],
)
def test_what_only_some_models_of_a_family_have_is_named(
    tiny: Tiny, name: str, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(IllegalCutError, match=what):
        check_cut(tiny(name, **changes), Span(0, 2))


@pytest.mark.parametrize(
    ("name", "span", "pads"),
    [
        ("llama", Span(0, 2), (2,)),
        ("llama", Span(1, 3), ()),
        ("llama", Span(2, 4), ()),
        ("llama4", Span(0, 4), (4,)),
        ("glm4moe", Span(0, 1), (1,)),
        ("glm4moe", Span(0, 4), (4,)),
        # Windows in layers 0 and 2, in 0 to 2 and 4 to 5: the last such layer where a span has none.
        ("gpt-oss", Span(1, 2), (2,)),
        ("gpt-oss", Span(3, 4), (2,)),
        ("gpt-oss", Span(2, 4), ()),
        ("cohere2", Span(3, 4), (5,)),
        ("cohere2", Span(4, 6), ()),
        ("gemma3", Span(5, 6), (7,)),
        ("gemma3", Span(0, 6), (6,)),
    ],
)
def test_zero_layers_fill_what_a_slice_lacks(tiny: Tiny, name: str, span: Span, pads: tuple[int, ...]) -> None:
    assert slice_pads(tiny(name), span) == pads


@pytest.mark.parametrize(
    ("name", "n_layers", "span", "n_pads"),
    [
        ("gemma2", 46, Span(0, 20), 26),
        ("gemma2", 46, Span(40, 46), 40),
        ("gemma2", 48, Span(2, 48), 1),
        ("gemma2", 48, Span(0, 46), 1),
        ("gemma2", 48, Span(0, 45), 2),
        ("gemma3", 62, Span(1, 2), 61),
        ("deepseek2", 60, Span(0, 26), 2),
        ("deepseek2", 60, Span(10, 36), 2),
        ("deepseek2", 60, Span(10, 37), 1),
        ("deepseek2", 60, Span(12, 60), 1),
        ("deepseek2", 60, Span(11, 60), 0),
    ],
)
def test_a_number_of_layers_with_a_meaning_is_kept_or_kept_clear_of(
    tiny: Tiny, name: str, n_layers: int, span: Span, n_pads: int
) -> None:
    assert len(slice_pads(tiny(name, n_layers=n_layers), span)) == n_pads


@pytest.mark.parametrize(
    ("name", "span", "pads"),
    [
        ("qwen35", Span(0, 2), (7,)),  # an attention layer
        ("qwen35", Span(3, 4), (6,)),  # a recurrent one
        ("qwen35", Span(2, 4), ()),
        ("qwen35", Span(0, 4), (4,)),  # the usual one
        ("nemotron_h", Span(1, 2), (5, 3)),  # a feed-forward layer is neither
        ("granitehybrid", Span(2, 3), (4,)),
        ("lfm2", Span(0, 1), (4,)),
        ("deepseek4", Span(3, 4), (6,)),
        ("deepseek4", Span(5, 8), ()),
        ("glm-dsa", Span(2, 3), ()),
    ],
)
def test_a_slice_gets_a_zero_layer_of_every_kind_it_lacks(
    tiny: Tiny, name: str, span: Span, pads: tuple[int, ...]
) -> None:
    assert slice_pads(tiny(name), span) == pads

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from meshswarm.stage.engine.llama import LlamaError, LlamaSpan, numclass
from meshswarm.stage.engine.llama_options import parse_llama_options


def load(path: Path) -> LlamaSpan:
    return LlamaSpan(path, n_cells=256, n_slots=2, n_threads=1, max_rows=16)


def test_it_knows_the_shape_of_what_it_loaded(tiny: Path) -> None:
    llama = load(tiny)
    assert (llama.n_layers, llama.n_embd, llama.n_vocab, llama.architecture) == (4, 64, 32, "llama")
    llama.close()


def test_a_file_llama_cpp_refuses_is_an_error_with_its_reason(tmp_path: Path, gguf_recipe: type) -> None:
    recipe = gguf_recipe()
    recipe.tensors.pop()
    path = recipe.write(tmp_path / "short.gguf")
    with pytest.raises(LlamaError, match=r"cannot load .*short\.gguf.*blk\.3\.ffn_down\.weight"):
        load(path)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match=r"cannot load .*none\.gguf"):
        load(tmp_path / "none.gguf")


def test_llama_cpp_prints_nothing(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny).close()
    with pytest.raises(LlamaError):
        load(tmp_path / "none.gguf")
    assert capfd.readouterr() == ("", "")


def test_the_numeric_class_is_one_short_word_that_stays() -> None:
    assert re.fullmatch(r"cpu-[0-9a-f]{12}", numclass())
    assert numclass() == numclass()


def logits_of(llama: LlamaSpan, n_rows: int, slots: Sequence[int] = (0,)) -> NDArray[np.float32]:
    """Logits of 576 positions of the first slot, computed `n_rows` at a time, beside the same in the other `slots`."""
    ids = np.random.default_rng(0).integers(0, 32, 576)
    for slot in slots:
        llama.remove(slot, 0)
    found = []
    for start in range(0, len(ids), n_rows):
        stop = min(start + n_rows, len(ids))
        for beside, slot in enumerate(slots):
            rows = slice(beside * (stop - start), (beside + 1) * (stop - start))
            llama.tokens[rows], llama.positions[rows] = ids[start:stop], np.arange(start, stop)
            llama.slots[rows], llama.wanted[rows] = slot, 1
        n_computed = len(slots) * (stop - start)
        llama.tap.start(n_computed)
        assert llama.decode(n_computed) == 0
        found.append(llama.logits(n_computed)[: stop - start].copy())
    return np.concatenate(found)


@pytest.mark.parametrize(
    "pairs", [[], ["type_k=q8_0", "type_v=q8_0"], ["flash_attn=on"], ["flash_attn=off", "type_k=q8_0"]], ids=" ".join
)
def test_options_that_change_bits_leave_the_exact_profile_exact(tiny: Path, pairs: list[str]) -> None:
    """From 512 cells on llama.cpp has kernels of its own for lone rows, so the context is longer."""
    options = parse_llama_options(pairs)
    llama = LlamaSpan(tiny, n_cells=768, n_slots=2, n_threads=1, max_rows=96, options=options)
    expected = logits_of(llama, 48)
    for n_rows in (2, 3, 7, 16, 31):
        assert np.array_equal(logits_of(llama, n_rows), expected), n_rows
    assert np.array_equal(logits_of(llama, 24, slots=(0, 1)), expected)
    assert not np.array_equal(logits_of(llama, 1), expected), "a lone row shows that this compares something"
    llama.set_threads(2)
    assert np.array_equal(logits_of(llama, 48), expected)
    llama.close()

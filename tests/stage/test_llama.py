from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshswarm.stage.llama import LlamaError, LlamaSpan, numclass


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

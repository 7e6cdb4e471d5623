"""The tiny models are what the parity tests need: stock llama.cpp computes them, and their answers vary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from tests.stage.tiny_models import N_VOCAB, TINY, write_tiny
from tests.stage.unsplit import Unsplit

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header

PROMPT = [(7 * n * n + 13 * n + 11) % N_VOCAB for n in range(40)]


@pytest.mark.parametrize("name", TINY)
def test_answers_vary(name: str, tmp_path: Path) -> None:
    path = write_tiny(name, tmp_path / "model.gguf")
    assert check_hyperparameters(read_header(path)).architecture == TINY[name].architecture
    unsplit = Unsplit(path, 256)
    rows = unsplit.rows(PROMPT, 0, range(len(PROMPT)))
    assert np.isfinite(rows).all() and 0.2 < rows.std() < 5
    answer = [int(rows[-1].argmax())]
    for step in range(24):
        answer.append(int(unsplit.rows(answer[-1:], len(PROMPT) + step, [0])[0].argmax()))
    unsplit.close()
    assert len(set(answer)) > 8, "it repeats itself, so it proves little"


def test_a_model_is_stored_as_told(tmp_path: Path) -> None:
    path = write_tiny("mixtral", tmp_path / "model.gguf", encoding=Encoding.Q8_0, keys={"expert_used_count": 3})
    header = read_header(path)
    assert header.scalar("llama.expert_used_count") == 3
    assert header.tensors["blk.0.ffn_up_exps.weight"].type.name == "Q8_0"
    assert header.tensors["blk.0.ffn_gate_inp.weight"].type.name == "F32"

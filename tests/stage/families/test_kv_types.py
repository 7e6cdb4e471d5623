"""K and V in 8 bits, and flash attention: a split computes the bits of the whole, kept in the same type, in every kind
of memory.

llama.cpp turns such K and V by a matrix before it stores them where all layers of a memory have heads of one size that
is a multiple of 64; a part of a model could choose otherwise than the whole. No architecture of the table has layers
with heads of two sizes: the settings that would make them are listed in no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.stage.chain import job
from tests.stage.tiny_models import TINY, write_tiny

from meshswarm.artifacts.gguf.check import check_hyperparameters, read_header
from meshswarm.span import Span
from meshswarm.stage.engine.compute import SpanComputer
from meshswarm.stage.engine.jobs import JobResult, SliceShape
from meshswarm.stage.engine.llama import LlamaSpan
from meshswarm.stage.engine.llama_options import KvType, LlamaOptions
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.slices.slicing import write_slice

N_CTX = 300
IDS = np.random.default_rng(5).integers(0, 160, N_CTX).astype(np.int32)
HEADS_OF_64 = {"attention.key_length": 64, "attention.value_length": 64}
LATENT_OF_96 = {
    "attention.kv_lora_rank": 64,
    "rope.dimension_count": 32,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
}
LATENT_OF_128 = {
    **LATENT_OF_96,
    "rope.dimension_count": 64,
    "attention.key_length": 128,
    "attention.key_length_mla": 96,
}
MODELS: list[tuple[str, Mapping[str, Any]]] = [
    ("llama", {}),
    ("gpt-oss", {}),
    ("gemma3", HEADS_OF_64),
    ("glm4moe", HEADS_OF_64),
    ("deepseek2", LATENT_OF_96),
    ("deepseek2", LATENT_OF_128),
    ("glm-dsa", LATENT_OF_128),
    ("deepseek4", {}),
    ("lfm2", {}),
    ("qwen35moe", HEADS_OF_64),
    ("granitehybrid", HEADS_OF_64),
]


class Part:
    def __init__(self, path: Path, span: Span, n_layers: int, options: LlamaOptions) -> None:
        llama = LlamaSpan(path, n_cells=512, n_slots=2, n_threads=1, max_rows=128, options=options)
        self.family = FAMILIES[llama.architecture]
        shape = SliceShape(
            span,
            n_layers,
            llama.n_embd,
            llama.n_vocab,
            N_CTX,
            llama.max_rows,
            takes_hidden=True,
            row_streams=self.family.row_streams,
            needs_tokens=self.family.needs_tokens,
        )
        self.span, self.is_last = span, span.stop == n_layers
        self.computer = SpanComputer(llama, shape, self.family, 2)


def logits(parts: Sequence[Part]) -> NDArray[np.float32]:
    """Of all rows of a prompt in chunks, and of steps of one row and of a few."""
    rows = []
    at = 0
    for n_rows in (20, 40, 30, 1, 1, 5, 1):
        ids, hidden = IDS[at : at + n_rows], None
        for part in parts:
            tokens = ids if hidden is None or part.family.needs_tokens else None
            outputs = tuple(range(n_rows)) if part.is_last else ()
            (outcome,) = part.computer.compute(
                [job(0, at, part.span.stop, tokens=tokens, hidden=hidden, outputs=outputs)]
            )
            assert isinstance(outcome, JobResult), outcome
            hidden = outcome.hidden
        parts[-1].computer.keep_rows()
        rows.append(parts[-1].computer.full_rows[0].copy())
        at += n_rows
    for part in parts:
        part.computer.close()
    return np.concatenate(rows)


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=[f"{name} {list(keys.values())}" for name, keys in MODELS])
def test_a_split_with_8_bit_k_and_v_has_the_bits_of_the_whole(
    tmp_path: Path, name: str, keys: Mapping[str, Any]
) -> None:
    options = LlamaOptions(type_k=KvType.Q8_0, type_v=KvType.Q8_0)
    path = write_tiny(name, tmp_path / "whole.gguf", keys=keys)
    whole = check_split(path, options)
    n_layers = check_hyperparameters(read_header(path)).n_layers
    assert not np.array_equal(whole, logits([Part(path, Span(0, n_layers), n_layers, LlamaOptions())]))


@pytest.mark.parametrize("name", TINY)
def test_a_split_with_flash_attention_has_the_bits_of_the_whole(tmp_path: Path, name: str) -> None:
    """The other parity tests leave it off wherever a peer does."""
    check_split(write_tiny(name, tmp_path / "whole.gguf"), LlamaOptions(flash_attn=True))


def check_split(path: Path, options: LlamaOptions) -> NDArray[np.float32]:
    """Fails unless two parts compute what the whole does; returns that."""
    header = read_header(path)
    n_layers = check_hyperparameters(header).n_layers
    starts = legal_cuts(header).starts
    middle = starts[len(starts) // 2]
    spans = [Span(0, middle), Span(middle, n_layers)]
    slices = [path.parent / f"{span.start}.gguf" for span in spans]
    for span, target in zip(spans, slices, strict=True):
        write_slice(path, header, span, target)
    split = logits([Part(target, span, n_layers, options) for target, span in zip(slices, spans, strict=True)])
    whole = logits([Part(path, Span(0, n_layers), n_layers, options)])
    assert np.array_equal(split, whole)
    return whole


def test_no_row_lets_layers_have_heads_of_two_sizes() -> None:
    for family in FAMILIES.values():
        listed = family.common_keys | family.uniform_keys | family.layer_keys | family.count_keys
        assert not any(key.endswith("_swa") and "length" in key for key in listed), family.architecture
        assert not family.layer_keys & {"attention.key_length", "attention.value_length"}, family.architecture

"""What models of one architecture differ in, each cut as a peer would cut it: bit for bit the unsplit model's numbers.

`test_parity` proves every architecture once. Here is what else its row lists, and every trap that a number of layers or
an old file lays.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from tests.stage import family_parity
from tests.stage.chain import Session
from tests.stage.family_parity import Proof, Row, differences
from tests.stage.variations import Variation, check_variation, keys

from meshswarm.stage.engine.profile import Profile

OWN_HEAD_SIZE = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
"""Not the width shared out among the heads, as in models whose attention scale depends on their number of layers."""
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_attn_factor": 0.9,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
    "rope.scaling.yarn_ext_factor": 0.7,
}
AS_BY_DEFAULT = [True] * 5 + [False] + [True] * 2
ARRAYS = {"attention.head_count_kv": [2] * 4, "feed_forward_length": [96] * 4}
EXPERT_ARRAYS = {"expert_used_count": [2] * 4, "expert_feed_forward_length": [64] * 4}
NOT_LATENT = {
    "attention.head_count_kv": 4,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}
NO_EXPERTS = {
    "leading_dense_block_count": 4,
    "expert_count": None,
    "expert_used_count": None,
    "expert_shared_count": 0,
    "expert_weights_norm": None,
}
WITH_ROPE_FREQS = r".*[._]scale|.*\.bias"


VARIATIONS = [
    *(
        Variation(name, encoding.name, {"encoding": encoding})
        for name in ("mixtral", "qwen3moe", "gemma3", "gpt-oss", "deepseek2")
        for encoding in (Encoding.F16, Encoding.Q8_0, Encoding.Q4_0)
    ),
    *(
        Variation(name, "rope_freqs", {"without": WITH_ROPE_FREQS})
        for name in ("llama", "llama4", "mistral3", "granite")
    ),
    *(
        Variation(name, "yarn", {"keys": YARN})
        for name in ("qwen2", "qwen3moe", "gpt-oss", "olmo3", "glm4", "minimax-m2", "phi3", "smollm3")
    ),
    Variation("gemma3", "linear rope", {"keys": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}}),
    Variation("gemma2", "46 layers", {"n_layers": 46, "keys": OWN_HEAD_SIZE}, at=(23,)),
    Variation("gemma3", "62 layers", {"n_layers": 62, "keys": OWN_HEAD_SIZE}, at=(1, 50)),
    Variation("gemma2", "48 layers, 46 of them in a span", {"n_layers": 48, "keys": OWN_HEAD_SIZE}, at=(2,)),
    Variation("gemma3", "windows in an array", keys(attention__sliding_window_pattern=[True, False, False, True] * 2)),
    Variation("gemma3", "windows in a period", keys(attention__sliding_window_pattern=3)),
    Variation(
        "gemma3",
        "windows in an array as by default",
        keys(attention__sliding_window_pattern=AS_BY_DEFAULT),
        is_same=True,
    ),
    Variation("gemma3", "no windows", keys(attention__sliding_window=None, rope__freq_base_swa=None)),
    Variation("gpt-oss", "windows everywhere", keys(attention__sliding_window_pattern=0)),
    Variation("cohere2", "one window, at the end", keys(attention__sliding_window_pattern=[False] * 5 + [True])),
    Variation("olmo2", "softer positions", keys(rope__freq_base=500000.0)),
    Variation("phi3", "a window that llama.cpp ignores", keys(attention__sliding_window=8), is_same=True),
    Variation("granite", "no positions", keys(rope__scaling__finetuned=False)),
    Variation("granite", "no scale of the embedding", keys(embedding_scale=None)),
    Variation("qwen2", "tied output", {"without": r"output\..*|.*[._]scale|attn_output.bias|ffn_.*\.bias"}),
    Variation("qwen3", "keys as arrays", {"keys": ARRAYS}, is_same=True),
    Variation("qwen3moe", "experts as arrays", {"keys": EXPERT_ARRAYS}, is_same=True),
    Variation("llama4", "experts in every layer", keys(interleave_moe_layer_step=1)),
    Variation("glm4moe", "three dense layers", keys(leading_dense_block_count=3)),
    Variation("glm4moe", "dense layers only", keys(leading_dense_block_count=6), at=(2, 4)),
    Variation("deepseek2", "groups of experts", keys(expert_group_count=4, expert_group_used_count=2)),
    Variation("deepseek2", "a temperature", keys(attention__temperature_scale=0.2, attention__temperature_length=16)),
    Variation("deepseek2", "60 layers, 26 and 27 of them in a span", {"n_layers": 60}, at=(26, 53)),
    Variation("deepseek2", "lite", {"n_layers": 27, **keys(attention__q_lora_rank=None)}, at=(5, 16)),
    Variation("deepseek2", "keys and values written out, as in old files", {"keys": NOT_LATENT}),
    Variation("deepseek2", "no experts", {"keys": NO_EXPERTS}),
    Variation("deepseek2", "no word on how experts are chosen", keys(expert_gating_func=None)),
]


@pytest.mark.parametrize("variation", VARIATIONS, ids=[variation.id for variation in VARIATIONS])
async def test_a_variation_computes_the_unsplit_models_bits(variation: Variation, tmp_path: Path) -> None:
    await check_variation(variation, tmp_path)


async def test_parts_in_large_contexts_compute_with_the_factors_of_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unsplit model is in a small context here, its parts in large ones; and in a large one it differs."""
    changes = {"without": WITH_ROPE_FREQS, "keys": {"rope.scaling.original_context_length": 512}}
    small = Proof(Row("phi3", changes), tmp_path / "small")
    steps = small.conversation(Profile.FAST).steps
    monkeypatch.setattr(family_parity, "N_CTX", 1000)
    with Session(small.hops(small.three_spans()), Profile.FAST) as session:
        assert not await differences(session, steps)
    large = Proof(Row("phi3", changes), tmp_path / "large")
    assert not np.array_equal(large.conversation(Profile.FAST).steps[0].logits, steps[0].logits)
    await small.close()
    await large.close()

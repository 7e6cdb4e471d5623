"""What models with layers of several kinds differ in: blocks that predict further, experts, where the kinds stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Encoding
from tests.stage.variations import Variation, check_variation, keys

MTP = {"nextn_predict_layers": 1}
NEMOTRON_MTP = {
    "attention.head_count_kv": [0, 0, 2, 0, 0, 2, 0, 2],
    "feed_forward_length": [0, 96, 0, 0, 96, 0, 96, 96],
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_shared_feed_forward_length": 64}
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
GLM_5_2 = [True, True, True, False, False, False]
NO_HASH = {"hash_layer_count": 0}
NO_LATENTS = r"ffn_latent.*|.*[._]scale|(attn_(q|k|v|output)|ffn_(up|down))\.bias"

VARIATIONS = [
    *(
        Variation(name, encoding.name, {"encoding": encoding}, at=(2, 5))
        for name in ("qwen35moe", "lfm2moe", "nemotron_h_moe", "granitehybrid", "deepseek4", "glm-dsa")
        for encoding in (Encoding.Q8_0, Encoding.Q4_0)
    ),
    *(
        Variation(name, "yarn", {"keys": YARN}, at=(2, 5))
        for name in ("qwen35", "qwen3next", "lfm2", "deepseek4", "glm-dsa")
    ),
    *(Variation(name, "groups of experts", {"keys": GROUPS}) for name in ("deepseek32", "glm-dsa", "nemotron_h_moe")),
    *(
        Variation(name, "a block that predicts further", {"n_layers": n_layers, "keys": MTP}, at=(1, 3), is_same=True)
        for name, n_layers in (("qwen35", 9), ("qwen35moe", 9), ("deepseek32", 5))
    ),
    *(
        Variation(name, "recurrent layers in an array", {"keys": {"attention.recurrent_layers": recurrent}})
        for name in ("qwen35", "qwen35moe", "qwen3next")
        for recurrent in ([False, True, True, True, True, True, True, False],)
    ),
    Variation("qwen35", "attention everywhere but once", keys(attention__recurrent_layers=[False] * 7 + [True])),
    Variation("granitehybrid", "experts", {"keys": EXPERTS}),
    Variation("granitehybrid", "no positions", keys(rope__scaling__finetuned=False)),
    Variation("granitehybrid", "no scale of the embedding", keys(embedding_scale=None)),
    Variation(
        "nemotron_h_moe",
        "a block that predicts further",
        {"n_layers": 8, "keys": MTP | NEMOTRON_MTP},
        at=(2, 5),
        is_same=True,
    ),
    Variation("nemotron_h_moe", "no latents", {"without": NO_LATENTS}),
    Variation("nemotron_h_moe", "narrow latents", keys(moe_latent_size=64)),
    Variation("nemotron_h_moe", "experts of several widths", keys(expert_feed_forward_length=[0, 64, 0, 0, 32, 0, 96])),
    Variation("nemotron_h", "one attention layer", keys(attention__head_count_kv=[0, 0, 0, 0, 0, 2, 0])),
    Variation("lfm2moe", "no dense layers", keys(leading_dense_block_count=0)),
    Variation("lfm2", "one attention layer", keys(attention__head_count_kv=[2, 0, 0, 0, 0, 0])),
    Variation("glm-dsa", "an indexer in every layer", keys(attention__indexer__types=None)),
    Variation(
        "glm-dsa",
        "a context as long as GLM-5.2's, and no word on indexers",
        keys(attention__indexer__types=None, context_length=1 << 20),
    ),
    Variation("deepseek4", "no hash layers", {"keys": NO_HASH}, n_prompt=150),
    Variation("deepseek4", "hash layers only", keys(hash_layer_count=8), n_prompt=150),
    Variation(
        "deepseek4", "one layer compressed by 4", keys(attention__compress_ratios=[0, 0, 128, 0, 128, 4, 128, 0])
    ),
]


@pytest.mark.parametrize("variation", VARIATIONS, ids=[variation.id for variation in VARIATIONS])
async def test_a_variation_computes_the_unsplit_models_bits(variation: Variation, tmp_path: Path) -> None:
    await check_variation(variation, tmp_path)

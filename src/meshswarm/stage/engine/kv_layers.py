"""What each layer keeps of a session: cells that grow with its positions, and state that does not.

The rule this file keeps: it says what llama.cpp allocates, not what the mathematics needs (measured with
llama-cpp-python 0.3.36, and read in its sources). So a multi-head latent layer keeps one row of latent and rotary part
and no V; a sliding window takes as many cells as the whole context, since only then can a session go back exactly
(`swa_full`, llama.cpp's default); and recurrent layers keep their state in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.errors import ConfigError
from meshswarm.stage.engine.llama_options import KvType
from meshswarm.stage.engine.settings import Settings

CELLS_STEP = 256
"""llama.cpp rounds the cells of a sequence up to a multiple of this."""
_BLOCK_BYTES = {KvType.F16: (1, 2), KvType.Q8_0: (32, 34)}
_F32 = 4


@dataclass(frozen=True, slots=True)
class Cells:
    """One row for every `ratio` positions, `n_heads` times `width` numbers of the type that K (`is_key`) or V is kept
    in. Raises ConfigError for a type whose blocks do not divide a head, which llama.cpp refuses."""

    width: int
    n_heads: int = 1
    ratio: int = 1
    is_key: bool = True

    def row_bytes(self, type_k: KvType, type_v: KvType) -> int:
        kind = type_k if self.is_key else type_v
        n_elements, n_bytes = _BLOCK_BYTES[kind]
        if self.width % n_elements:
            raise ConfigError(
                f"this model's {'K' if self.is_key else 'V'} heads of {self.width} numbers cannot be kept in "
                f"{kind.name.lower()}, whose blocks hold {n_elements}; use f16"
            )
        return self.n_heads * self.width // n_elements * n_bytes


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer keeps. `state_bytes`: of each session, however long it is. `n_saved_rows`: so many rows of its
    first cells are saved with the state, since going on may drop them."""

    cells: tuple[Cells, ...] = ()
    state_bytes: int = 0
    n_saved_rows: int = 0

    def saved_bytes(self, type_k: KvType = KvType.F16, type_v: KvType = KvType.F16) -> int:
        """Bytes of one saved state of a session."""
        rows = self.n_saved_rows * self.cells[0].row_bytes(type_k, type_v) if self.n_saved_rows else 0
        return self.state_bytes + rows

    def cell_bytes(self, n_cells: int, type_k: KvType = KvType.F16, type_v: KvType = KvType.F16) -> int:
        """Bytes that one session of `n_cells` positions takes, without its state."""
        total = 0
        for cells in self.cells:
            n_rows = n_cells if cells.ratio == 1 else _rounded(-(-n_cells // cells.ratio))
            total += n_rows * cells.row_bytes(type_k, type_v)
        return total

    def token_bytes(self, type_k: KvType = KvType.F16, type_v: KvType = KvType.F16) -> float:
        """Bytes that one more position takes, on average."""
        return sum(cells.row_bytes(type_k, type_v) / cells.ratio for cells in self.cells)


def session_cells(n_ctx: int) -> int:
    """Cells of a session of `n_ctx` positions: one more, for the row that pads lone ones, rounded up."""
    return _rounded(n_ctx + 1)


def layer_kvs(header: GgufHeader) -> tuple[LayerKv, ...]:
    """What every layer of the model keeps, in order."""
    settings = Settings(header)
    rule = _RULES.get(settings.architecture, _attention)
    model = _Model(settings)
    return tuple(rule(model, layer) for layer in range(settings.n_layers))


def is_kv_known(architecture: str) -> bool:
    """False: what its layers keep was never compared with llama.cpp's own report; `layer_kvs` takes it for plain
    attention."""
    return architecture in _RULES


def _rounded(n_cells: int) -> int:
    return -(-n_cells // CELLS_STEP) * CELLS_STEP


class _Model:
    """The settings of a model that decide what its layers keep."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        heads = settings.per_layer("attention.head_count", 0)
        head_size = settings.n_embd // max(heads[0], 1)
        has_own = settings.has("attention.head_count_kv")
        self.kv_heads = settings.per_layer("attention.head_count_kv", 0) if has_own else heads
        self.key_size = settings.number("attention.key_length", head_size)
        self.value_size = settings.number("attention.value_length", head_size)
        self.indexer_size = settings.number("attention.indexer.key_length", 0)
        self.is_latent = settings.has("attention.key_length_mla") and settings.has("attention.value_length_mla")


def _attention(model: _Model, layer: int) -> LayerKv:
    n_heads = model.kv_heads[layer]
    keys = Cells(model.key_size, n_heads)
    if model.is_latent:
        return LayerKv((keys,))
    return LayerKv((keys, Cells(model.value_size, n_heads, is_key=False)))


def _indexed(model: _Model, layer: int) -> LayerKv:
    """Latent attention over positions that an indexer picks: the indexer keeps keys of its own."""
    return LayerKv((*_attention(model, layer).cells, Cells(model.indexer_size)))


def _glm_dsa(model: _Model, layer: int) -> LayerKv:
    return _indexed(model, layer) if _has_indexer(model, layer) else _attention(model, layer)


def _has_indexer(model: _Model, layer: int) -> bool:
    if model.settings.has("attention.indexer.types"):
        return model.settings.per_layer("attention.indexer.types", 1)[layer] == 1
    # What llama.cpp takes for models that do not say: all layers before GLM-5.2, which is told by its context.
    is_before_5_2 = model.settings.number("context_length", 0) < 1 << 20
    return is_before_5_2 or layer < 3 or (layer - 2) % 4 == 0


_CSA_RATIO, _HCA_RATIO = 4, 128


def _deepseek4(model: _Model, layer: int) -> LayerKv:
    """A window of latent rows, compressed ones beside it, and what the compressors have begun."""
    width, indexer = model.key_size, model.indexer_size
    window = Cells(width)
    n_window = model.settings.number("attention.sliding_window", 0)
    match model.settings.per_layer("attention.compress_ratios", 0)[layer]:
        case 4:  # compressed sparse attention
            state = 2 * 2 * (width + indexer) * 2 * _CSA_RATIO * _F32  # values and scores, of two overlapping blocks
            compressed = Cells(width, ratio=_CSA_RATIO), Cells(indexer, ratio=_CSA_RATIO)
            return LayerKv((window, *compressed), state, n_window)
        case 128:  # heavily compressed attention
            return LayerKv((window, Cells(width, ratio=_HCA_RATIO)), 2 * width * _HCA_RATIO * _F32, n_window)
        case _:
            return LayerKv((window,), n_saved_rows=n_window)


def _recurrent(model: _Model) -> LayerKv:
    """A state-space or delta-net layer: the last inputs of its convolution, and its state."""
    settings = model.settings
    if settings.has("shortconv.l_cache"):
        return LayerKv(state_bytes=_F32 * settings.n_embd * (settings.number("shortconv.l_cache", 1) - 1))
    inner, state = settings.number("ssm.inner_size", 0), settings.number("ssm.state_size", 0)
    width = inner + 2 * settings.number("ssm.group_count", 0) * state
    return LayerKv(state_bytes=_F32 * ((settings.number("ssm.conv_kernel", 1) - 1) * width + state * inner))


def _delta_net(model: _Model, layer: int) -> LayerKv:
    settings = model.settings
    if settings.has("attention.recurrent_layers"):
        is_recurrent = bool(settings.per_layer("attention.recurrent_layers", 0)[layer])
    else:
        is_recurrent = (layer + 1) % max(1, settings.number("full_attention_interval", 4)) != 0
    return _recurrent(model) if is_recurrent else _attention(model, layer)


def _hybrid(model: _Model, layer: int) -> LayerKv:
    return _attention(model, layer) if model.kv_heads[layer] else _recurrent(model)


def _nemotron_h(model: _Model, layer: int) -> LayerKv:
    if model.settings.per_layer("feed_forward_length", 0)[layer]:
        return LayerKv()
    return _hybrid(model, layer)


_RULES: dict[str, Callable[[_Model, int], LayerKv]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "glm4"),
            *("glm4moe", "deepseek2", "gpt-oss", "granite", "olmo2", "cohere2", "minimax-m2", "llama4", "smollm3"),
        ),
        _attention,
    ),
    "deepseek32": _indexed,
    "glm-dsa": _glm_dsa,
    "deepseek4": _deepseek4,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _delta_net),
    **dict.fromkeys(("granitehybrid", "lfm2", "lfm2moe"), _hybrid),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
}

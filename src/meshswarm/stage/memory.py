"""What layers cost in memory, from a model's header: weights per layer, what stands outside the layers, KV cells."""

from __future__ import annotations

import re

from meshswarm.artifacts.gguf import GgufHeader

KV_ELEMENT_BYTES = 2  # K and V are kept in f16


def layer_weight_bytes(header: GgufHeader, n_layers: int) -> list[int]:
    """Bytes of the tensors of each layer, in order."""
    sizes = [0] * n_layers
    for tensor in header.tensors.values():
        match = re.match(r"blk\.(\d+)\.", tensor.name)
        if match is not None and int(match[1]) < n_layers:
            sizes[int(match[1])] += tensor.n_bytes
    return sizes


def shared_weight_bytes(header: GgufHeader) -> int:
    """Bytes of the tensors outside the layers: embeddings, output head, norms. A middle span needs almost none."""
    return sum(tensor.n_bytes for tensor in header.tensors.values() if not tensor.name.startswith("blk."))


def kv_bytes_per_layer(n_kv_row: int, n_ctx: int, n_sessions: int) -> int:
    """Bytes of the KV cells of one layer; `n_kv_row`: elements of one position's K and V together."""
    return KV_ELEMENT_BYTES * n_kv_row * n_ctx * n_sessions

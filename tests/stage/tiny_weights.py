"""The tensors of a tiny random model: which ones a llama.cpp model of that architecture has, and what stands in them.

The rule this file keeps: names and shapes are llama.cpp's own. `llama_model_init_from_user` builds a model from
metadata alone and asks its caller for every tensor; what it asks for is what a file has to hold. A tensor's numbers
depend on its name and shape alone, so two models that differ in one feature share all other weights.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Encoding
from gguf.quants import quant_shape_to_byte_shape
from llama_cpp import _ctypes_extensions
from llama_cpp import llama_cpp as llama
from numpy.typing import NDArray

from meshswarm.stage.engine.llama import start_llama

_MATRICES = re.compile(
    r"(token_embd|output|blk\.\d+\.(attn_|ffn_|ssm_(in|out)|shortconv\.(in|out)_proj|nextn\.)).*weight"
)
_ALWAYS_F32 = re.compile(r"norm\.|ffn_gate_inp|attn_sinks|tid2eid|attn_comp")


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


_ggml = _ctypes_extensions.load_shared_library("ggml-base", llama._base_path)
_open_gguf = _function(_ggml, "gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams)
_close_gguf = _function(_ggml, "gguf_free", None, ctypes.c_void_p)
_name_of = _function(_ggml, "ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
_n_dims_of = _function(_ggml, "ggml_n_dims", ctypes.c_int, ctypes.c_void_p)
_n_bytes_of = _function(_ggml, "ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
_n_rows_of = _function(_ggml, "ggml_nrows", ctypes.c_int64, ctypes.c_void_p)
_quantize_chunk = _function(
    _ggml,
    "ggml_quantize_chunk",
    ctypes.c_size_t,
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
)
_NE_OFFSET = 16
"""Where `int64_t ne[4]` stands in the public struct ggml_tensor: behind an enum, padding and a pointer."""


def asked_shapes(metadata: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor llama.cpp asks for when it builds the model of `metadata`, a GGUF without tensors.

    Shapes have rows first, as numpy has them. Optional tensors are asked for like the others.
    """
    start_llama()
    shapes: dict[str, tuple[int, ...]] = {}

    def on_tensor(tensor: int, _user_data: int) -> None:
        ne = (ctypes.c_int64 * 4).from_address(tensor + _NE_OFFSET)
        shapes[_name_of(tensor).decode()] = tuple(ne[: _n_dims_of(tensor)])[::-1]
        assert _n_bytes_of(tensor) == 4 * math.prod(ne) and _n_rows_of(tensor) == math.prod(ne[1:])

    callback = llama.llama_model_set_tensor_data_t(on_tensor)
    params = llama.llama_model_default_params()
    params.load_mtp = True
    params.n_gpu_layers = 0
    context = _open_gguf(os.fsencode(metadata), _InitParams(True, None))
    assert context, metadata
    model = llama.llama_model_init_from_user(context, callback, None, params)
    _close_gguf(context)
    assert model, f"llama.cpp cannot build the model of {metadata}"
    llama.llama_model_free(model)
    return shapes


def random_numbers(name: str, shape: tuple[int, ...], *, embedding_std: float = 1.0) -> NDArray[np.float32]:
    """Weights that keep a row's size about constant, so that every layer has its say and answers vary."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    numbers = random.standard_normal(shape, np.float32)
    part = name.split(".", 2)[2] if name.startswith("blk.") else name
    if part.startswith(("rope_f", "rope_factors")):
        numbers = np.linspace(1, 8, shape[0], dtype=np.float32) * (1 + np.float32(0.1) * np.abs(numbers))
    elif part.startswith("ssm_a"):  # states fade: some within a token or two, some over hundreds
        numbers = -np.exp(random.uniform(-4, 0.5, shape)).astype(np.float32)
    elif part.startswith("ssm_dt"):
        numbers = numbers - 1
    elif part.startswith("hc_"):
        numbers = _hyper_connection(part, numbers)
    elif part.startswith("ssm_d") or ("norm" in part and part.endswith(".weight")):
        gain = 2 if re.match(r"attn_(q|k)_norm", part) else 1
        numbers = np.float32(gain) * (1 + np.float32(0.2) * numbers)
    elif part.endswith(".bias") or part.startswith("attn_sinks"):
        numbers = np.float32(0.3) * numbers
    elif part == "token_embd.weight":
        numbers = np.float32(embedding_std) * numbers
    else:
        gain = 3 if re.match(r"attn_(q|k|qkv|kv_a)|ffn_gate_inp|indexer", part) else 1
        numbers = numbers * np.float32(gain / math.sqrt(shape[-1]))
    return numbers.astype(np.float32)


def _hyper_connection(part: str, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    if part.endswith("fn.weight"):
        return numbers / np.float32(math.sqrt(numbers.shape[-1]))
    return numbers if part.endswith("base.weight") else 1 + np.float32(0.2) * numbers


def random_experts(name: str, shape: tuple[int, ...], n_experts: int) -> NDArray[np.int32]:
    """For each token of a vocabulary (rows), the experts that work on it, all different."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    rows = [random.permutation(n_experts)[: shape[1]] for _ in range(shape[0])]
    return np.array(rows, np.int32)


def encoding_of(name: str, shape: tuple[int, ...], encoding: Encoding) -> Encoding:
    """How llama.cpp's own quantizer would store this tensor in a file of that encoding: what is small stays F32."""
    is_matrix = len(shape) > 1 and _MATRICES.fullmatch(name) and not _ALWAYS_F32.search(name)
    return encoding if is_matrix and shape[-1] % 32 == 0 else Encoding.F32


def encoded(numbers: NDArray[np.float32], encoding: Encoding) -> NDArray[Any]:
    """The rows of `numbers` as llama.cpp's own quantizer writes them, byte for byte."""
    if encoding is Encoding.F32:
        return numbers
    numbers = np.ascontiguousarray(numbers)
    target = np.empty(quant_shape_to_byte_shape(numbers.shape, encoding), np.uint8)
    n_per_row = numbers.shape[-1]
    n_bytes = _quantize_chunk(
        encoding, numbers.ctypes.data, target.ctypes.data, 0, numbers.size // n_per_row, n_per_row, None
    )
    assert n_bytes == target.nbytes
    return target

"""The oracle of the parity tests: the whole model through llama-cpp-python's low-level API, with nothing of ours in it.

Only the choices that change bits are ours: no repacked weight buffers where ours has none, flash attention, and the
chunking.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as llama
from numpy.typing import NDArray

from meshswarm.stage.engine.llama import model_params, start_llama
from meshswarm.stage.families.table import FAMILIES


class Unsplit:
    """The unsplit model on one thread: one sequence, or several of `n_ctx` positions each."""

    def __init__(self, path: Path, n_ctx: int = 1024, *, n_sequences: int = 1) -> None:
        start_llama()
        model = llama.llama_model_default_params()
        model.use_extra_bufts = model_params().use_extra_bufts
        model.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(os.fsencode(path), model)
        context = llama.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx * n_sequences, 512, 512
        context.n_seq_max, context.kv_unified = n_sequences, False
        context.n_threads = context.n_threads_batch = 1
        family = FAMILIES.get(self._architecture())
        context.flash_attn_type = int(family is not None and family.needs_flash_attention)
        self._context = llama.llama_init_from_model(self._model, context)
        self._batch = llama.llama_batch_init(512, 0, 1)
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama.llama_vocab_n_tokens(self._vocab)

    def _architecture(self) -> str:
        value = ctypes.create_string_buffer(64)
        llama.llama_model_meta_val_str(self._model, b"general.architecture", value, len(value))
        return value.value.decode()

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text with special tokens in it."""
        raw = text.encode()
        ids = (llama.llama_token * (len(raw) + 8))()
        n_tokens = llama.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), False, True)
        return list(ids[:n_tokens])

    def rows(
        self, tokens: Sequence[int], pos0: int, outputs: Sequence[int], *, sequence: int = 0
    ) -> NDArray[np.float32]:
        """Decode one chunk of a sequence; the logits of its rows `outputs`, float32 [n_outputs, n_vocab]."""
        return self._decode([(token, pos0 + row, sequence) for row, token in enumerate(tokens)], outputs)

    def together(self, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Decode one token of each sequence in one batch; their logits."""
        rows = zip(tokens, positions, range(len(tokens)), strict=True)
        return self._decode(list(rows), range(len(tokens)))

    def _decode(self, rows: Sequence[tuple[int, int, int]], outputs: Sequence[int]) -> NDArray[np.float32]:
        """Decode rows of a token, a position and a sequence."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row] = int(token), position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = row in outputs
        assert llama.llama_decode(self._context, batch) == 0
        logits = np.empty((len(outputs), self.n_vocab), np.float32)
        for index, row in enumerate(outputs):
            pointer = llama.llama_get_logits_ith(self._context, row)
            ctypes.memmove(logits[index].ctypes.data, pointer, logits[index].nbytes)
        return logits

    def forget(self, start: int) -> None:
        """Drop the positions from `start` on."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), 0, start, -1)

    def save(self) -> bytes:
        """All that was computed so far."""
        state = (ctypes.c_uint8 * llama.llama_state_seq_get_size(self._context, 0))()
        assert llama.llama_state_seq_get_data(self._context, state, len(state), 0) == len(state)
        return bytes(state)

    def restore(self, state: bytes) -> None:
        """Be as at `save`."""
        self.forget(0)
        copy = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert llama.llama_state_seq_set_data(self._context, copy, len(state), 0) == len(state)

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

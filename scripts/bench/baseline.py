"""The baseline of the speed benchmarks: unsplit llama-cpp-python, a bare greedy loop in its own process.

It is the strictest one there is: llama.cpp's own functions and an argmax, without sampler chain, text or HTTP. Its
settings (flash attention, KV types, buffer types) are those of a peer's engine, so that only the splitting differs.
Several prompts are computed together: one batch for all their rows, then one row of each per step.

As a program it reads one JSON list of prompts (lists of token ids) a line and answers with the times of the steps.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np

from meshswarm.stage.engine.llama import context_params, model_params, start_llama

N_CTX = 4096
MAX_ROWS = 512


class Baseline:
    """The process, for up to `n_streams` prompts at a time. Every answer has `n_tokens` tokens."""

    def __init__(self, gguf: Path, n_tokens: int, *, n_threads: int = 1, n_streams: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(gguf), str(n_tokens), str(n_threads), str(n_streams)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, prompt: list[int]) -> float:
        """Seconds per token after the first."""
        times_s = self.times_s([prompt])
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1)

    def times_s(self, prompts: Sequence[list[int]]) -> list[float]:
        """When the first, second, ... token of all answers was known, in seconds from the start."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        times_s: list[float] = json.loads(self._process.stdout.readline())
        return times_s

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def tokenize(gguf: Path, text: str) -> list[int]:
    start_llama()
    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), settings)
    data = text.encode()
    tokens = (llama_cpp.llama_token * len(data))()
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), tokens, len(data), True, False)
    llama_cpp.llama_model_free(model)
    return list(tokens[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    for name in ("n_tokens", "n_threads", "n_streams"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    start_llama()
    model = llama_cpp.llama_model_load_from_file(bytes(options.gguf), model_params())
    cells = N_CTX // options.n_streams
    settings = context_params(n_cells=cells, n_slots=options.n_streams, n_threads=options.n_threads, max_rows=MAX_ROWS)
    context = llama_cpp.llama_init_from_model(model, settings)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    for line in sys.stdin:
        print(json.dumps(generate(context, n_vocab, json.loads(line), options.n_tokens)), flush=True)


def generate(context: ctypes.c_void_p, n_vocab: int, prompts: list[list[int]], n_tokens: int) -> list[float]:
    """When each step's tokens were known, in seconds from the start. Does not end at an end-of-text token."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    started_s = time.perf_counter()
    times_s = []
    batch = llama_cpp.llama_batch_init(MAX_ROWS, 0, 1)
    rows, first_position = prompts, [0] * len(prompts)
    for _ in range(n_tokens):
        last_rows = fill(batch, rows, first_position)
        if llama_cpp.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")
        first_position = [at + len(of) for at, of in zip(first_position, rows, strict=True)]
        rows = [[greedy(context, n_vocab, row)] for row in last_rows]
        times_s.append(time.perf_counter() - started_s)
    llama_cpp.llama_batch_free(batch)
    return times_s


def fill(batch: Any, rows: list[list[int]], first_position: list[int]) -> list[int]:
    """Put the tokens of every sequence into `batch`; returns where each one's last row stands."""
    last_rows = []
    batch.n_tokens = 0
    for sequence, tokens in enumerate(rows):
        for offset, token in enumerate(tokens):
            at = batch.n_tokens
            batch.token[at], batch.pos[at] = token, first_position[sequence] + offset
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = offset == len(tokens) - 1
            batch.n_tokens += 1
        last_rows.append(batch.n_tokens - 1)
    return last_rows


def greedy(context: ctypes.c_void_p, n_vocab: int, row: int) -> int:
    return int(np.argmax(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (n_vocab,))))


if __name__ == "__main__":
    main()

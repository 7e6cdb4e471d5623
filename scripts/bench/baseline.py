"""The baseline of the speed benchmarks: unsplit llama-cpp-python, one thread, a bare greedy loop in its own process.

It is the strictest one there is: llama.cpp's own functions and an argmax, without sampler chain, text or HTTP. Its
settings (flash attention, KV types, buffer types) are those of a peer's engine, so that only the splitting differs.

As a program it reads one JSON list of token ids a line and answers with the times of the tokens it generated.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np

from meshswarm.stage.llama import context_params, model_params, start_llama

N_CTX = 4096


class Baseline:
    """The process. `run` gives the seconds per token after the first."""

    def __init__(self, gguf: Path, n_tokens: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(gguf), str(n_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, prompt: list[int]) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        times_s = json.loads(self._process.stdout.readline())
        return float((times_s[-1] - times_s[0]) / (len(times_s) - 1))

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
    gguf, n_tokens = sys.argv[1], int(sys.argv[2])
    start_llama()
    model = llama_cpp.llama_model_load_from_file(gguf.encode(), model_params())
    settings = context_params(n_cells=N_CTX, n_slots=1, n_threads=1, max_rows=512)
    context = llama_cpp.llama_init_from_model(model, settings)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    for line in sys.stdin:
        print(json.dumps(generate(context, n_vocab, json.loads(line), n_tokens)), flush=True)


def generate(context: ctypes.c_void_p, n_vocab: int, prompt: list[int], n_tokens: int) -> list[float]:
    """When each of the tokens was known, in seconds on some clock. Does not end at an end-of-text token."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    times_s = []
    batch = prompt
    for _ in range(n_tokens):
        tokens = (llama_cpp.llama_token * len(batch))(*batch)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(batch))) != 0:
            sys.exit("llama_decode failed")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,))
        batch = [int(np.argmax(logits))]
        times_s.append(time.perf_counter())
    return times_s


if __name__ == "__main__":
    main()

"""The child process that loads a file no one has loaded before. Started by `probe`, never imported by a peer.

The rule this file keeps: limits and an empty network first, then the file. Everything it has to say goes to standard
output in lines; the last one says why it failed. Exit status 0 means that the file loaded and computed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

import llama_cpp

_N_CTX = 64
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # unshare(2): CLONE_NEWUSER, CLONE_NEWNET
_ERROR_LEVEL = 4  # ggml's GGML_LOG_LEVEL_ERROR
_TEXT = "".join(map(chr, range(0x180))).encode() + "ﬁ€한😀".encode()
"""Characters of every length in UTF-8, control characters among them: no text may abort a tokenizer."""


def _limit_resources(memory_bytes: int, seconds: int) -> None:
    if sys.platform == "win32":  # no such limits there: the wall limit remains
        return
    import resource

    # At the soft limit of processor time comes SIGXCPU; at the hard one SIGKILL, which would look like lack of memory.
    limits = [(resource.RLIMIT_CORE, 0, 0), (resource.RLIMIT_FSIZE, 0, 0), (resource.RLIMIT_CPU, seconds, seconds + 5)]
    if sys.platform == "linux":  # macOS does not limit the address space
        limits.append((resource.RLIMIT_AS, memory_bytes, memory_bytes))
    for which, *wanted in limits:
        _, inherited = resource.getrlimit(which)
        soft, hard = wanted if inherited == resource.RLIM_INFINITY else (min(limit, inherited) for limit in wanted)
        resource.setrlimit(which, (soft, hard))


def _leave_network() -> None:
    """Enter a network of this process's own, with nothing in it, where the system allows that (Linux): whatever a file
    makes of this process, it reaches nobody. Without root that takes user namespaces, which some systems forbid."""
    if sys.platform != "linux":
        return
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is not None:
        unshare(_NEW_NETWORK if os.geteuid() == 0 else _NEW_NETWORK | _NEW_USER)


class _FirstError:
    """Hears what llama.cpp logs and keeps the first error: it is why a load failed, later ones say that it did."""

    def __init__(self) -> None:
        self.text = ""
        self.callback = llama_cpp.llama_log_callback(self._hear)  # lives as long as llama.cpp may call it

    def _hear(self, level: int, text: bytes, _user_data: object) -> None:
        if level == _ERROR_LEVEL and not self.text:
            self.text = text.decode(errors="replace").strip()


def _load(path: Path, *, vocab_only: bool) -> None:
    """Load the file with every check that llama.cpp has, and use it once. Raises RuntimeError."""
    first_error = _FirstError()
    llama_cpp.llama_log_set(first_error.callback, ctypes.c_void_p(0))
    try:
        _use(path, vocab_only=vocab_only)
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {first_error.text}" if first_error.text else str(error)) from None


def _use(path: Path, *, vocab_only: bool) -> None:
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.check_tensors = True
    parameters.vocab_only = vocab_only
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise RuntimeError("the loader refused the file")
    if vocab_only:
        _tokenize_a_text(model)
    else:
        _decode_two_tokens(model)


def _tokenize_a_text(model: llama_cpp.llama_model_p) -> None:
    vocab = llama_cpp.llama_model_get_vocab(model)
    if vocab is None:
        raise RuntimeError("the file has no vocabulary")
    tokens = (llama_cpp.llama_token * (2 * len(_TEXT)))()
    n_tokens = llama_cpp.llama_tokenize(vocab, _TEXT, len(_TEXT), tokens, len(tokens), True, False)
    if n_tokens <= 0:
        raise RuntimeError(f"tokenizing a text gave {n_tokens}")


def _decode_two_tokens(model: llama_cpp.llama_model_p) -> None:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = _N_CTX
    parameters.n_threads = parameters.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("no context could be made")
    for _ in range(2):
        tokens = (llama_cpp.llama_token * 1)(0)
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 1))
        if status != 0:
            raise RuntimeError(f"decoding a token failed with status {status}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="probe_child", description="Load a GGUF once, with limits.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--vocab-only", action="store_true")
    parser.add_argument("--memory", type=int, required=True, help="bytes of address space")
    parser.add_argument("--seconds", type=int, required=True, help="of processor time")
    options = parser.parse_args(arguments)
    _leave_network()
    _limit_resources(options.memory, options.seconds)
    try:
        _load(options.path, vocab_only=options.vocab_only)
    except (RuntimeError, MemoryError, OSError, ValueError) as error:
        print(str(error) or type(error).__name__, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

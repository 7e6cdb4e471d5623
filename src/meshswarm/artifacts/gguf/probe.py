"""The first load of a file by llama.cpp, in a child process that may die of it.

The rule this file keeps: no file enters a peer's one process before it has loaded and computed a token in a child
with limits on memory, processor time, wall time, written files and core dumps. `probe_child` is that child; `probe`
starts it and says what became of it: a file that cannot be loaded is not taken for one that this machine has no
memory for, nor the other way round.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from meshswarm.artifacts.gguf.split import part_paths
from meshswarm.errors import ArtifactError, OutOfMemoryError

_BASE_MEMORY_BYTES = 8 << 30
_BASE_SECONDS = 60.0
_SLOW_LOAD_BYTES_PER_S = 20e6
_KEPT_OUTPUT_BYTES = 1 << 16
_PACKAGE_ROOT = Path(__file__).parents[2]
_WANT_OF_MEMORY = re.compile(r"alloc|memory|temporarily unavailable|map segment", re.IGNORECASE)
"""In the last words of a child that got no memory: for its data, a thread, or a library."""


def engine_build() -> str:
    """Names the llama.cpp installed here: its package's version, and size and time of its library."""
    version = importlib.metadata.version("llama_cpp_python")
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ArtifactError("llama-cpp-python is not installed: no model can be loaded")
    libraries = sorted((Path(found.origin).parent / "lib").glob("*llama.*"))
    marks = [f"{library.stat().st_size}.{library.stat().st_mtime_ns}" for library in libraries[:1]]
    return "-".join([version, *marks])


def probe(path: Path, *, vocab_only: bool = False, wall_limit_s: float | None = None) -> None:
    """Load `path` in a child process and decode two tokens (`vocab_only`: tokenize a text). Blocking.

    Raises ArtifactError, with the child's last words, when that crashes, fails or takes too long; OutOfMemoryError when
    this machine, or the limit set on this process, had no memory for it.
    """
    size = sum(part.stat().st_size for part in part_paths(path))
    memory_bytes = _BASE_MEMORY_BYTES + 3 * size
    limit_s = _BASE_SECONDS + size / _SLOW_LOAD_BYTES_PER_S if wall_limit_s is None else wall_limit_s
    command = [sys.executable, "-P", "-m", "meshswarm.artifacts.gguf.probe_child", str(path)]
    command += ["--memory", str(memory_bytes), "--seconds", str(int(limit_s) + 1)]
    if vocab_only:
        command.append("--vocab-only")
    search_path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search_path, "GGML_NO_BACKTRACE": "1"}
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"{path} is refused: llama.cpp did not load it within {limit_s:.1f} s") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be tried in a child process: {error}") from error
    if child.returncode == 0:
        return
    words = _last_line(child.stdout)
    if _lacked_memory(child.returncode, words, memory_bytes):
        raise OutOfMemoryError(
            f"{path} could not be tried in a child process for want of memory (llama.cpp {_fate(child.returncode)}: "
            f"{words}): close other programs, or serve fewer layers"
        )
    raise ArtifactError(f"{path} is refused: llama.cpp {_fate(child.returncode)}: {words}")


def _lacked_memory(status: int, words: str, memory_bytes: int) -> bool:
    """Whether the child failed for what this machine lacks rather than for its file. It may take `memory_bytes`, more
    than any honest file of its size needs; one that wanted more than that is to blame itself."""
    if sys.platform == "win32":
        return False
    if status == -signal.SIGKILL:  # the system's own answer; what takes too long gets another signal, or is timed out
        return True
    import resource

    _, inherited = resource.getrlimit(resource.RLIMIT_AS)
    is_squeezed = inherited != resource.RLIM_INFINITY and inherited < memory_bytes
    return is_squeezed and _WANT_OF_MEMORY.search(words) is not None


def _fate(status: int) -> str:
    return f"was killed by signal {-status} while loading it" if status < 0 else "could not load it"


def _last_line(output: bytes) -> str:
    lines = output[-_KEPT_OUTPUT_BYTES:].decode(errors="replace").split("\n")
    spoken = [line.strip() for line in lines if line.strip()]
    printable = "".join(char if char.isprintable() else "?" for char in (spoken[-1] if spoken else "it said nothing"))
    return printable[:300]

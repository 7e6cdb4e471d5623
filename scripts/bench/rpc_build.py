"""llama.cpp's own way to share a model, its RPC server, from the very source that llama-cpp-python was built from.

    .venv/bin/python scripts/bench/rpc_build.py

The wheel has neither the server nor a client for it. Source and programs stay in the cache folder. Compiling takes
about ten minutes on one core, once, and needs CMake and a C++ compiler; like the wheel, the programs are for the CPU
they were built on.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshswarm.config import default_cache

PACKAGE = "llama-cpp-python"
TARGETS = ("ggml-rpc-server", "llama-bench")
SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_RPC": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}


@dataclass(frozen=True)
class RpcTools:
    """The programs: `server` computes for others, `bench` (llama-bench) measures as their client."""

    server: Path
    bench: Path


def rpc_tools() -> RpcTools:
    """The programs, built now if they are not there. Ends the program when that fails."""
    folder = source_folder()
    built = folder / "build-rpc"
    tools = RpcTools(*(built / "bin" / target for target in TARGETS))
    if not (tools.server.is_file() and tools.bench.is_file()):
        print(f"building {' and '.join(TARGETS)} in {built}, once: about ten minutes", file=sys.stderr, flush=True)
        settings = [f"-D{name}={value}" for name, value in SETTINGS.items()]
        run(["cmake", "-S", str(folder / "vendor" / "llama.cpp"), "-B", str(built), *settings])
        run(["nice", "-n", "10", "cmake", "--build", str(built), "--parallel", "1", "--target", *TARGETS])
    return tools


def source_folder() -> Path:
    """The unpacked source package of the version that is installed."""
    version = importlib.metadata.version(PACKAGE)
    name = f"{PACKAGE.replace('-', '_')}-{version}"
    folder = default_cache() / "bench" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", f"--no-binary={PACKAGE}", "--dest", scratch]
            run([*pip, f"{PACKAGE}=={version}"])
            with tarfile.open(Path(scratch) / f"{name}.tar.gz") as archive:
                archive.extractall(scratch, filter="data")
            (Path(scratch) / name).rename(folder)
    return folder


def run(command: Sequence[str]) -> None:
    """Run a step of the build; end the program with what it said when it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")
    if done.returncode:
        last_lines = "\n".join(done.stdout.splitlines()[-15:])
        sys.exit(f"`{' '.join(command)}` failed with exit status {done.returncode}:\n{last_lines}")


if __name__ == "__main__":
    found = rpc_tools()
    print(f"{found.server}\n{found.bench}")

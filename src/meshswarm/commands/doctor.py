"""`meshswarm doctor`: what this machine and this folder can do, and what to do about what they cannot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from meshswarm import __version__
from meshswarm.artifacts.store import Store
from meshswarm.commands.control import find_running
from meshswarm.config import DEFAULT_API_PORT, DEFAULT_PEER_PORT, Home, default_cache
from meshswarm.errors import MeshswarmError
from meshswarm.identity import Identity

LOW_DISK_BYTES = 2 << 30


class Verdict(Enum):
    OK = "ok"
    WARNING = "warn"
    FAILURE = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `advice` says what to do when it is not fine."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""

    @property
    def is_failure(self) -> bool:
        return self.verdict is Verdict.FAILURE

    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "verdict": self.verdict.value, "found": self.found, "advice": self.advice}


def examine(home: Home) -> list[Finding]:
    """Everything, in the order a person would ask. Never raises: what fails becomes a finding."""
    checks: tuple[Callable[[Home], Iterator[Finding]], ...] = (
        _program, _engine, _machine, _folder, _ports, _models,
    )  # fmt: skip
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check(home))
        except (MeshswarmError, OSError, ImportError) as error:
            findings.append(Finding(check.__name__.strip("_"), Verdict.FAILURE, str(error)))
    return findings


def _program(_home: Home) -> Iterator[Finding]:
    yield Finding("meshswarm", Verdict.OK, f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    if sys.platform != "win32":
        yield Finding("event loop", Verdict.OK, f"uvloop {importlib.metadata.version('uvloop')}")


def _engine(_home: Home) -> Iterator[Finding]:
    import llama_cpp

    from meshswarm.stage.tap import native_available

    yield Finding("llama.cpp", Verdict.OK, f"llama-cpp-python {llama_cpp.__version__}")
    if native_available():
        yield Finding("native tap", Verdict.OK, "compiled")
    else:
        yield Finding(
            "native tap",
            Verdict.WARNING,
            "not compiled: each layer costs more time, and much more on a busy machine",
            "install a C compiler and reinstall meshswarm",
        )
    gpu = bool(llama_cpp.llama_supports_gpu_offload())
    yield Finding("GPU", Verdict.OK, "llama.cpp was built with a GPU back-end" if gpu else "none: computing on the CPU")


def _machine(home: Home) -> Iterator[Finding]:
    yield Finding("processors", Verdict.OK, str(os.cpu_count()))
    folder = home.root if home.root.exists() else home.root.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    verdict = Verdict.OK if free > LOW_DISK_BYTES else Verdict.WARNING
    advice = "" if verdict is Verdict.OK else "free some room, or choose another folder with --home"
    yield Finding("disk", verdict, f"{free / 1e9:.1f} GB free in {folder}", advice)


def _folder(home: Home) -> Iterator[Finding]:
    if home.key.exists():
        yield Finding("key", Verdict.OK, str(Identity.load_or_create(home.key).peer_id))
    else:
        yield Finding("key", Verdict.OK, f"none yet; the first start makes one in {home.root}")
    running = find_running(home)
    yield Finding("peer", Verdict.OK, "not running" if running is None else f"running, endpoint {running.api}")


def _ports(home: Home) -> Iterator[Finding]:
    if find_running(home) is not None:
        return
    for kind, port, what in (
        (socket.SOCK_DGRAM, DEFAULT_PEER_PORT, "UDP port for peers"),
        (socket.SOCK_STREAM, DEFAULT_API_PORT, "TCP port of the endpoint"),
    ):
        with socket.socket(socket.AF_INET, kind) as probe:
            if kind is socket.SOCK_STREAM and os.name == "posix":  # as the endpoint binds: a port just left is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                yield Finding(what, Verdict.WARNING, f"{port}: {error.strerror}", "a free port is taken instead")
            else:
                yield Finding(what, Verdict.OK, f"{port} is free")


def _models(home: Home) -> Iterator[Finding]:
    models = Store(home.root).models() if home.root.exists() else []
    names = ", ".join(info.name for info in models) or "none yet; `meshswarm models pull` gets the small default one"
    yield Finding("models", Verdict.OK, names)
    yield Finding("downloads", Verdict.OK, str(default_cache()))

"""`meshswarm doctor`: what this machine and this folder can do, and what to do about what they cannot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from meshswarm import __version__
from meshswarm.artifacts.files import read_json
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import find_running
from meshswarm.config import DEFAULT_API_PORT, DEFAULT_PEER_PORT, Home, default_cache
from meshswarm.errors import ConfigError, MeshswarmError
from meshswarm.identity import Identity
from meshswarm.membership.swarms import Swarms

LOW_DISK_BYTES = 2 << 30
ENGINE_NOTE = "meshswarm-engine.json"  # left in the environment by scripts/setup_venv.py


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
        _program, _engine, _devices, _machine, _folder, _swarms, _ports, _models,
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

    from meshswarm.stage.engine.tap import native_available

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


def _devices(_home: Home) -> Iterator[Finding]:
    from meshswarm.stage.engine.devices import DeviceKind, gpus, list_devices

    devices = list_devices()
    chosen = gpus(devices)
    for device in devices:
        memory = f"{device.free_bytes / 1e9:.1f} of {device.total_bytes / 1e9:.1f} GB free"
        if device.kind is DeviceKind.CPU:
            yield Finding("CPU", Verdict.OK, f"{device.description}, {device.total_bytes / 1e9:.1f} GB")
        elif device in chosen and not device.is_proved:
            yield Finding(
                device.name,
                Verdict.WARNING,
                f"{device.description}, {memory}; unproved: whole models are computed on it, parts of models are not",
                "to serve a part of a model, give no GPU options: it is computed on the CPU",
            )
        elif device in chosen:
            yield Finding(device.name, Verdict.OK, f"{device.description}, {memory}")
        else:
            yield Finding(device.name, Verdict.OK, f"{device.description}, {memory}; not used")
    if not chosen:
        yield _without_gpu()


def _without_gpu() -> Finding:
    """Whether there is a GPU that this build of llama.cpp cannot use, and why it was built so, as far as the set-up
    told. It may have been built elsewhere, or the GPU come since."""
    why = (read_json(Path(sys.prefix) / ENGINE_NOTE) or {}).get("why")
    why = why if isinstance(why, str) else ""
    shown = _shown_gpus()
    if "asks for cpu" not in why and "GPU is here" not in why and "failed" not in why:
        why = f"llama.cpp was built without what {shown} needs" if shown else ""
    elif "asks for cpu" in why:
        why = ""
    if not why:
        return Finding("GPU", Verdict.OK, "none that this build of llama.cpp could use: computing on the CPU")
    advice = (
        "install what is missing, then start with scripts/run, or name a back-end: MESHSWARM_BACKEND=cuda scripts/run"
    )
    return Finding("GPU", Verdict.WARNING, f"computing on the CPU: {why}", advice)


def _shown_gpus(root: Path = Path("/")) -> str:
    """What the system shows of GPUs, whatever llama.cpp can use: a name for a person, empty where there are none."""
    signs = {"an NVIDIA GPU": "proc/driver/nvidia/gpus/*", "an AMD GPU": "dev/kfd", "a GPU": "dev/dri/renderD*"}
    return next((name for name, sign in signs.items() if any(root.glob(sign))), "")


def _machine(home: Home) -> Iterator[Finding]:
    from meshswarm.stage.engine.threads import candidate_counts, usable_cpus

    most = candidate_counts(usable_cpus())[0]
    threads = "1 thread computes" if most == 1 else f"up to {most} threads compute"
    yield Finding("processors", Verdict.OK, f"{os.cpu_count()}; {threads}, --threads chooses")
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
    owner = {} if running is None else running.get("/meshswarm/status").get("owner", {})
    if owner.get("reason"):
        yield Finding("strangers' work", Verdict.OK, f"{owner['mode']}: {owner['reason']}")


def _swarms(home: Home) -> Iterator[Finding]:
    """The private swarms of this folder, each with its key."""
    now_ms = int(time.time() * 1000)
    swarms = Swarms(home)
    for name in swarms.names():
        what = f"swarm {name}"
        try:
            standing = swarms.folder(name).load()
        except ConfigError as error:
            yield Finding(what, Verdict.FAILURE, str(error))
            continue
        if standing.is_outdated(now_ms):
            advice = "ask a member for a new invite and enter it with `meshswarm swarm join`"
            yield Finding(what, Verdict.FAILURE, "its key was changed while this peer was away for too long", advice)
        elif standing.is_behind:
            advice = "start a peer in it: it gets the new key from the next member it meets"
            yield Finding(what, Verdict.WARNING, "its key was changed, and the new one has not come yet", advice)
        else:
            yield Finding(what, Verdict.OK, f"private, member list number {standing.number}")


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

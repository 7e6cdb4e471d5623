"""Real peers in real processes, started through the command line, each with its own folder, on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.files import TEMPORARY_SUFFIX

READY_TIMEOUT_S = 90.0
"""Generous: the first load of a new slice happens in a child process, on a machine that may be busy."""


@dataclass
class PeerProcess:
    """One running `meshswarm serve --json`."""

    home: Path
    process: subprocess.Popen[str]
    lines: queue.Queue[str | None]
    shared: Sequence[str] = ()
    ready: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def api(self) -> str:
        return str(self.ready["api"])

    @property
    def peer_id(self) -> str:
        return str(self.ready["peer_id"])

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    def wait_for(self, event: str, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """The next event of this name. Fails with everything the peer said when it ends or stays silent."""
        while True:
            try:
                line = self.lines.get(timeout=timeout_s)
            except queue.Empty:
                pytest.fail(f"no {event!r} within {timeout_s} s; events so far: {self.events}; stderr: {self.errors()}")
            if line is None:
                pytest.fail(f"the peer ended before {event!r}: {self.events}; stderr: {self.errors()}")
            said = json.loads(line)
            self.events.append(said)
            if said.get("event") == event:
                return said

    def errors(self) -> str:
        return (self.home.parent / f"{self.home.name}.stderr").read_text()

    def what_it_does(self) -> str:
        """What each of its threads is at, when it lives, after all it complained of."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        return f"{self.home.name}, exit code {self.process.poll()}:\n{self.errors()[-6000:]}"

    def stop(self) -> int:
        """Ctrl-C, then the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


StartPeer = Callable[..., PeerProcess]
_running: list[PeerStarter] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a test that failed goes what its peers were doing then: one that hangs would else leave no trace."""
    report = yield
    if report.failed and item.path.parent == Path(__file__).parent:
        report.sections += [
            ("peer", peer.what_it_does()) for starter in _running for peer in starter.peers if peer.ready
        ]
    return report


class Prepared:
    """What peers made of a model file at their start, for those that come later: the file hashed, slices cut, hashed
    and tried. A peer that is given it starts as it does for the second time in its folder."""

    OF_EVERYBODY = ("vocabularies",)
    OF_HOLDERS = ("models", "headers", "slices", "probed", *OF_EVERYBODY)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def give(self, home: Path, names: Sequence[str]) -> None:
        """Links: nothing of it is ever changed in place."""
        for name in names:
            if (self._folder / name).is_dir() and not (home / name).exists():
                shutil.copytree(self._folder / name, home / name, copy_function=os.link)

    def take(self, home: Path, names: Sequence[str]) -> None:
        for name in names:
            for made in (home / name).rglob("*"):
                kept = self._folder / made.relative_to(home)
                if made.is_file() and not made.name.endswith(TEMPORARY_SUFFIX) and not kept.exists():
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):  # one of a peer's passing files
                        os.link(made, kept)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("prepared"))


@dataclass
class PeerStarter:
    """Starts peers below one folder and in one swarm with a random name; ends all it started.

    They share what was `prepared` of the `model`, those that hold it all of it, unless they are to start `cold`.
    """

    root: Path
    prepared: Prepared
    model: Path
    swarm: str = field(default_factory=lambda: f"test-{secrets.token_hex(8)}")
    peers: list[PeerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        _running.append(self)

    def __call__(
        self,
        *options: str,
        home: str | None = None,
        wait: bool = True,
        swarm: str | None = None,
        under: tuple[str, ...] = (),
        cold: bool = False,
    ) -> PeerProcess:
        folder = self.root / (home or f"peer{len(self.peers)}")
        shared = () if cold else Prepared.OF_HOLDERS if str(self.model) in options else Prepared.OF_EVERYBODY
        self.prepared.give(folder, shared)
        command = [
            *under, sys.executable, "-m", "meshswarm", "--home", str(folder), "serve", "--json",
            "--swarm", swarm or self.swarm, "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--threads", "1",
            *options,
        ]  # fmt: skip
        with (self.root / f"{folder.name}.stderr").open("w") as stderr:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
        peer = PeerProcess(folder, process, lines, shared)
        self.peers.append(peer)
        if wait:
            peer.ready = peer.wait_for("ready")
            self.prepared.take(folder, shared)
        return peer

    def stop_all(self) -> None:
        _running.remove(self)
        for peer in self.peers:
            if peer.process.poll() is None:
                peer.process.send_signal(signal.SIGINT)
        for peer in self.peers:
            try:
                peer.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                peer.kill()
            self.prepared.take(peer.home, peer.shared)  # also what its first request made


@pytest.fixture
def start_peer(tmp_path: Path, smollm2: Path, prepared: Prepared) -> Iterator[PeerStarter]:
    """Starts peers for one test. `smollm2` makes sure that the model is there, so that no peer has to download it."""
    starter = PeerStarter(tmp_path, prepared, smollm2)
    yield starter
    starter.stop_all()


@dataclass(frozen=True)
class ThreePeers:
    """Layers 0:10, 10:20 and 20:30 in three processes, each knowing only the one before it, and a pure client."""

    spans: tuple[PeerProcess, PeerProcess, PeerProcess]
    client: PeerProcess

    @property
    def all(self) -> tuple[PeerProcess, ...]:
        return (*self.spans, self.client)


@pytest.fixture(scope="session")
def three_peers(tmp_path_factory: pytest.TempPathFactory, smollm2: Path, prepared: Prepared) -> Iterator[ThreePeers]:
    starter = PeerStarter(tmp_path_factory.mktemp("three-peers"), prepared, smollm2)
    try:
        first = starter("--model", str(smollm2), "--layers", "0:10")
        second = starter("--model", str(smollm2), "--layers", "10:20", "--join", first.address)
        third = starter("--model", str(smollm2), "--layers", "20:30", "--join", second.address)
        client = starter("--join", third.address)
        yield ThreePeers((first, second, third), client)
    finally:
        starter.stop_all()

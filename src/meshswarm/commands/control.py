"""How commands talk to the peer that runs in the same folder: through its own HTTP API, found in `running.json`.

The file says nothing that outlives the process it names; a stale one (the peer was killed) counts as "not running".
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from meshswarm.config import Home, HomeLock
from meshswarm.errors import ConfigError, LocalError, MeshswarmError, NoRouteError, UnknownModelError

ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A peer process of this folder: `api` is its base URL (`http://HOST:PORT/v1`), `api_key` its key or None; `errand`
    what it was started for and how it got into its swarm, empty for one that a person runs."""

    pid: int
    api: str
    api_key: str | None
    errand: str = ""

    def get(self, path: str) -> Any:
        """The JSON answer of a GET on `path`, such as "/v1/models". Raises MeshswarmError with the API's message."""
        with self._request("GET", path, None) as response:
            return _json_or_error(response)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed POST. Raises MeshswarmError with the API's message, also in mid-stream."""
        with self._request("POST", path, json.dumps(body)) as response:
            if response.status != 200:
                _json_or_error(response)
            for raw in response:
                line = raw.strip()
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise _error_of(event["error"], "the answer broke off")
                    yield event

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: str | None) -> Iterator[http.client.HTTPResponse]:
        url = urlsplit(self.api)
        connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=ANSWER_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, path, body, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise LocalError(f"the peer at {self.api} does not answer: {error}") from error
        finally:
            connection.close()


def _json_or_error(response: http.client.HTTPResponse) -> Any:
    try:
        body = json.loads(response.read())
    except ValueError:
        raise LocalError(f"the peer answered with HTTP {response.status} and no JSON") from None
    if response.status >= 400:
        raise _error_of(body.get("error", {}), f"HTTP {response.status}")
    return body


def _error_of(said: dict[str, Any], otherwise: str) -> MeshswarmError:
    """The API's error as one of this program's: those are told apart that a command has more to say of."""
    message = str(said.get("message", otherwise))
    match said.get("code"):
        case "no_route":
            return NoRouteError(message)
        case "model_not_found":
            return UnknownModelError(message)
        case _:
            return MeshswarmError(message)


def announce_running(home: Home, api: str, api_key: str | None, errand: str = "") -> None:
    """Say in `running.json` (mode 0600) how this process is reached; `forget_running` takes it away.

    Raises ConfigError when the file cannot be written.
    """
    temporary = home.status.with_suffix(".new")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"pid": os.getpid(), "api": api, "api_key": api_key, "errand": errand}, file)
        temporary.replace(home.status)
    except OSError as error:
        raise ConfigError(f"{home.status} cannot be written: {error.strerror or error}") from error


def forget_running(home: Home) -> None:
    """Take back what this process announced. Another's word stays: it may be the peer that holds the folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(home.status.read_text())["pid"] == os.getpid():
            home.status.unlink(missing_ok=True)


def find_running(home: Home) -> RunningPeer | None:
    """The peer that runs in this folder, or None. Whoever holds the folder's lock is running; nothing else is asked."""
    try:
        stated = json.loads(home.status.read_text())
        pid, api, key = int(stated["pid"]), str(stated["api"]), stated["api_key"]
        peer = RunningPeer(pid, api, key, str(stated.get("errand", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        HomeLock(home).release()
    except ConfigError:
        return peer
    return None

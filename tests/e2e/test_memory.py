"""Peers on machines smaller than what they are to serve: they take what fits, or say what would, before they try."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

UNDER_LIMIT = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
os.environ["MALLOC_ARENA_MAX"] = "1"
os.execv(sys.argv[2], sys.argv[2:])
"""
LIMIT = 3 << 29
"""Bytes of address space: enough for the program and a model of 100 MB, but not for the many sessions below."""
MANY_SESSIONS = ("--sessions", "32", "--ctx", "4095")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps to RLIMIT_AS")


def on_a_small_machine(start_peer: Any, smollm2: Path, *options: str, **how: Any) -> Any:
    under = (sys.executable, "-c", UNDER_LIMIT, str(LIMIT))
    return start_peer("--model", str(smollm2), *MANY_SESSIONS, *options, under=under, **how)


def test_without_a_choice_of_layers_a_peer_serves_those_that_fit_and_says_so(start_peer: Any, smollm2: Path) -> None:
    peer = on_a_small_machine(start_peer, smollm2)
    start, stop = map(int, peer.ready["layers"].split(":"))
    assert start == 0 and 0 < stop < 30
    assert peer.ready["missing"] == [f"{stop}:30"]
    (notice,) = [event["message"] for event in peer.events if event["event"] == "notice"]
    assert re.search(rf"takes \d\.\d GB .* are free: serving the layers 0:{stop}, which fit$", notice), notice
    memory = peer.ready["memory"]
    n_layers = memory["kv_bytes"] / (32 * 4096 * 2 * 3 * 64 * 2)
    assert n_layers == pytest.approx(stop + 1, abs=0.01), "and the zero layer that the slice ends in"
    assert sum(memory.values()) < LIMIT
    assert peer.stop() == 0


def test_layers_that_do_not_fit_are_refused_before_anything_is_written(start_peer: Any, smollm2: Path) -> None:
    peer = on_a_small_machine(start_peer, smollm2, "--layers", "0:29", wait=False, cold=True)
    assert peer.process.wait(timeout=60) == 1
    *_, last = iter(peer.lines.get, None)
    complaint = json.loads(last)["error"]
    fitting = r"the layers (0:\d+) would fit, or these would fit with --sessions (\d+) or --ctx \d+$"
    found = re.search(fitting, complaint)
    assert found is not None and "Traceback" not in peer.errors(), complaint
    assert not (peer.home / "slices").exists() and not (peer.home / "probed").exists()
    again = on_a_small_machine(start_peer, smollm2, "--layers", found[1], home=peer.home.name, cold=True)
    assert again.ready["layers"] == found[1]
    assert again.stop() == 0

"""A loop that stands still is noticed from outside, whatever holds it up, and one that works is left alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, re, sys, time, uvloop
from meshswarm.commands.watchdog import Watchdog

def sleeping_part():
    time.sleep(1.2)

def greedy_part():  # holds the interpreter's lock all the while
    started = time.monotonic()
    while time.monotonic() < started + 1.2:
        re.match("(a+)+$", "a" * 22 + "b")

def busy_part():
    pass

async def main(part, silence_s):
    with Watchdog(lambda sentence: print(sentence, flush=True), silence_s=silence_s, beat_s=0.05):
        for _ in range(4):
            await asyncio.sleep(0.05)
        part()
        for _ in range(26):
            await asyncio.sleep(0.05)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(globals()[sys.argv[1]], float(sys.argv[2])))
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the peer's loop there is another one")


def run(part: str, silence_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, part, str(silence_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize("part", ["sleeping_part", "greedy_part"])
def test_a_loop_that_stands_still_says_where_and_for_how_long(part: str) -> None:
    done = run(part, 0.5)
    assert f"in {part}" in done.stderr
    assert "did nothing for 1." in done.stdout


def test_a_loop_that_works_is_left_alone() -> None:
    done = run("busy_part", 1.0)
    assert (done.stdout, done.stderr) == ("", "")

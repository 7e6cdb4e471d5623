"""What surrounds a peer in the foreground: its loop is watched, and what it says comes out, the last word too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, functools, sys, time
from pathlib import Path
from types import SimpleNamespace
from meshswarm.commands import serve
from meshswarm.config import Home

class StandingStill:
    def __init__(self, settings, report):
        pass

    def stop(self):
        pass

    async def run(self):
        await asyncio.sleep(0.2)
        time.sleep(1.2)
        await asyncio.sleep(0.3)

serve.Peer = StandingStill
serve.Watchdog = functools.partial(serve.Watchdog, silence_s=0.5, beat_s=0.05)
sys.exit(serve.serve_forever(SimpleNamespace(home=Home(Path(sys.argv[1])), api=None), as_json=True))
"""


def test_a_peer_that_stood_still_says_so_and_where_and_ends_in_good_order(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    warning, *_, last = map(json.loads, done.stdout.splitlines())
    assert warning["event"] == "warning" and "did nothing for" in warning["message"]
    assert last == {"event": "stopped"}
    assert "in run" in done.stderr

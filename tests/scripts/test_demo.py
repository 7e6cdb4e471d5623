"""The demo: three real peers, one question, three equal answers, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_three_peers_answer_alike(smollm2: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "demo.py"), "What is a lighthouse?", "--max-tokens", "12"],
        capture_output=True, text=True, timeout=170, check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS / "bench")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Route and numclass are the same at all three" in done.stdout
    assert "The three answers are the same" in done.stdout
    assert done.stdout.count("tokens/s") == 3

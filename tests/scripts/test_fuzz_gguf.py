"""A sample of what `scripts/fuzz_gguf.py` does: what passes the check loads or is refused, and ends nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import fuzz_gguf

from meshswarm.artifacts.gguf.check import check_tokenizer, read_header
from meshswarm.stage.families.table import FAMILIES

SCRIPT = Path(fuzz_gguf.__file__)
N_MUTATIONS = 150


def test_a_sample_of_damaged_models_is_refused_or_harmless() -> None:
    command = [sys.executable, str(SCRIPT), "--mutations", str(N_MUTATIONS), "--load"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    ends = {end: int(count) for count, end in (line.strip().split("  ", 1) for line in done.stdout.splitlines())}
    assert ends["refused by the check"] + ends["passed the check"] == N_MUTATIONS
    loads = {end: count for end, count in ends.items() if end.startswith("passed, then")}
    assert sum(loads.values()) == ends["passed the check"] > 0
    assert set(loads) <= {"passed, then loaded", "passed, then refused"}, done.stdout


def test_every_proved_architecture_passes_the_check_and_its_damage_differs(tmp_path: Path) -> None:
    seen = set()
    for path in fuzz_gguf.corpus(tmp_path):
        header = read_header(path)
        check_tokenizer(header)
        seen.add(header.text("general.architecture"))
        damaged = {fuzz_gguf.damaged(header, random.Random(seed)) for seed in range(5)}
        assert len(damaged) >= 4 and damaged == {fuzz_gguf.damaged(header, random.Random(seed)) for seed in range(5)}
    assert seen == set(FAMILIES)

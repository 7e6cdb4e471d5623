"""How long a peer takes from start to `ready`, and what it costs while nobody asks.

    .venv/bin/python scripts/bench/cold_start.py [--starts 5] [--idle-s 30]

The rules: `ready` within 3 s with the model on disk (median), and below 1 % of a core when idle. The first start in a
new folder, which cuts and checks the slice, is shown beside the others.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import time
from pathlib import Path

from peers import MODEL, PeerProcess, fetch_model, machine, scratch_folder

ALLOWED_S = 3.0
ALLOWED_PERCENT = 1.0
SETTLE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--layers", nargs="*", default=["0:30", "10:20"])
    options = parser.parse_args()
    print(machine(), flush=True)
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        for layers in options.layers:
            report(folder / layers.replace(":", "-"), layers, options.starts, options.idle_s)


def report(home: Path, layers: str, starts: int, idle_s: float) -> None:
    arguments = ["--model", MODEL, "--layers", layers, "--swarm", f"bench-{secrets.token_hex(4)}", "--threads", "1"]
    arguments += ["--listen", "127.0.0.1:0", "--api", "127.0.0.1:0"]
    times_s = []
    for _ in range(1 + starts):
        with PeerProcess(home, *arguments) as peer:
            times_s.append(peer.wait_ready().ready_after_s)
    with PeerProcess(home, *arguments) as peer:
        idle_percent = idle_cpu_percent(peer.wait_ready().process.pid, idle_s)
    first, later = times_s[0], statistics.median(times_s[1:])
    spread = f"{min(times_s[1:]):.2f} to {max(times_s[1:]):.2f}"
    print(
        f"layers {layers}: ready after {later:.2f} s (median of {starts}, {spread}; first start in a new folder "
        f"{first:.2f} s)   rule (<= {ALLOWED_S:g} s) {verdict(later <= ALLOWED_S)}"
    )
    print(
        f"layers {layers}: {idle_percent:.2f} % of a core over {idle_s:.0f} idle seconds   "
        f"rule (< {ALLOWED_PERCENT:g} %) {verdict(idle_percent < ALLOWED_PERCENT)}",
        flush=True,
    )


def verdict(kept: bool) -> str:
    return "kept" if kept else "BROKEN"


def idle_cpu_percent(pid: int, idle_s: float) -> float:
    time.sleep(SETTLE_S)
    before, started = cpu_seconds(pid), time.monotonic()
    time.sleep(idle_s)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - started)


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads (Linux, proc(5))."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

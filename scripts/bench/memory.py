"""Resident memory of peers with a third of the layers each, against what they must hold.

    .venv/bin/python scripts/bench/memory.py [--ctx 4095] [--sessions 4]

Three peers with 10 of 30 layers each. The rule: a peer stays under its slice's bytes + KV + 160 MB resident, freshly
started and after it has worked (a prompt of 1,000 tokens and 64 more).
"""

from __future__ import annotations

import argparse
import re
import secrets
from pathlib import Path

from baseline import tokenize
from peers import MODEL, PeerProcess, ask, chain, even_spans, fetch_model, machine, scratch_folder

from meshswarm.artifacts import sources
from meshswarm.artifacts.store.store import Store
from meshswarm.span import Span
from meshswarm.stage.sizes.memory import Load, MemoryModel
from meshswarm.stage.slices.store import Slices

ALLOWED_MB = 160.0
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctx", type=int, default=4095)
    parser.add_argument("--sessions", type=int, default=4)
    options = parser.parse_args()
    print(machine(), flush=True)
    words = tokenize(sources.fetch(MODEL), "one two three four five six seven eight nine ten " * 200)
    settings = ["--threads", "1", "--ctx", str(options.ctx), "--sessions", str(options.sessions)]
    with scratch_folder() as folder:
        fetch_model(folder / "first")
        with chain(folder, even_spans(3), f"bench-{secrets.token_hex(4)}", *settings) as peers:
            print(f"Resident memory in MB, {options.sessions} sessions of {options.ctx} positions")
            print("  layers    slice      KV   fresh  worked  (anon)  (file)   beyond slice and KV")
            fresh = [resident_bytes(peer.process.pid, "VmRSS") for peer in peers]
            body = {"model": None, "prompt": words[:1000], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            ask(peers[0].api, "/completions", body)
            for peer, before in zip(peers, fresh, strict=True):
                report(peer, before, options.ctx, options.sessions)


def report(peer: PeerProcess, fresh: int, n_ctx: int, n_sessions: int) -> None:
    span = Span.parse(peer.ready["layers"])
    store = Store(peer.home)
    (model,) = store.models()
    slice_bytes = Slices(store, peer.home).file(model.model_id, span).n_bytes
    kv_bytes = MemoryModel(store.header(model.model_id), Load(n_ctx, n_sessions)).span(span).kv
    worked, anon, file = (resident_bytes(peer.process.pid, kind) for kind in ("VmRSS", "RssAnon", "RssFile"))
    beyond = (max(fresh, worked) - slice_bytes - kv_bytes) / MB
    verdict = "kept" if beyond <= ALLOWED_MB else "BROKEN"
    figures = "".join(f"{n_bytes / MB:8.1f}" for n_bytes in (slice_bytes, kv_bytes, fresh, worked, anon, file))
    print(f"  {span!s:>6} {figures}   {beyond:6.1f}   rule (<= {ALLOWED_MB:.0f} MB) {verdict}")


def resident_bytes(pid: int, kind: str) -> int:
    """Resident memory of a process (Linux, proc(5)): "VmRSS" is all of it, mapped pages of its slice included."""
    found = re.search(rf"^{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()

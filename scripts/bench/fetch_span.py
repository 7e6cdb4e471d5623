#!/usr/bin/env python3
"""How many bytes a peer fetches that serves a third of a model, beside the bytes of those layers and the header.

    fetch_span.py [--quick] [--json]

One peer seeds SmolLM2; another with an empty folder serves 0:10, then one 10:20, then one 20:30. What each took from
others as pieces, with the header that came before, is compared with its tensors' own bytes and the header.
"""

from __future__ import annotations

import secrets

from figures import Figure, Report, arguments, chosen, run
from peers import LAYERS, MODEL, PeerProcess, even_spans, fetch_model, scratch_folder

from meshswarm.artifacts import sources
from meshswarm.artifacts.ranges import n_bytes_of
from meshswarm.artifacts.store.store import Store
from meshswarm.span import Span
from meshswarm.stage.slices.store import Slices

MOST = 1.05


def main() -> None:
    options, report = chosen(arguments(__doc__, rounds=1))
    swarm = f"bench-{secrets.token_hex(4)}"
    listen = ["--swarm", swarm, "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--no-lan", "--no-rendezvous"]
    with scratch_folder() as folder:
        fetch_model(folder / "seeder")
        store = Store(folder / "named")
        info = store.import_file(sources.fetch(MODEL))
        slices = Slices(store, folder / "named")
        with PeerProcess(folder / "seeder", *listen).wait_ready() as seeder:
            for number, span in enumerate(even_spans(3)[:1] if options.quick else even_spans(3)):
                needed = sum(map(n_bytes_of, slices.needs(info.model_id, Span.parse(span)))) + info.header_length
                arguments_of = ["--model", info.id_text, "--layers", span, "--threads", "1", "--join", seeder.address]
                peer = PeerProcess(folder / str(number), *listen, *arguments_of)
                with peer.wait_ready():
                    pieces = next(event for event in peer.before_ready if event["event"] == "fetched")
                fetched = int(pieces["bytes"]) + info.header_length
                measured(report, span, fetched, needed, sum(info.file_lengths))
    report.close()


def measured(report: Report, span: str, fetched: int, needed: int, whole: int) -> None:
    what = f"fetched for the layers {span} of {LAYERS} ({100 * fetched / whole:.0f} % of the file)"
    report.add(Figure(what, "MB", (fetched / 1e6,), "their own bytes and the header", (needed / 1e6,), MOST, True))


if __name__ == "__main__":
    run(main)

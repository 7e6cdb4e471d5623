"""Results as tables for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from meshswarm.commands.doctor import Finding

PIPE_WIDTH = 400
SHORT_ID = 8


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Nothing is ever cut: ids and addresses are there to be copied, so long ones fold, and pipes have no width. No
    line ends in blanks."""
    table = Table(box=None, pad_edge=False, show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    is_terminal = Console().is_terminal
    console = Console(width=None if is_terminal else PIPE_WIDTH)
    with console.capture() as captured:
        console.print(table, soft_wrap=not is_terminal)
    for line in captured.get().splitlines():
        print(line.rstrip())


def show_status(status: dict[str, Any]) -> None:
    serving = "nothing" if status["model"] is None else f"{status['layers']} of {status['n_layers']}, {status['model']}"
    rows = [
        ("peer", status["address"]),
        ("swarm", status["swarm"]),
        ("endpoint", status["api"]),
        ("layers", serving),
        ("role", _role_words(status)),
        *_computing(status),
        ("sessions", f"{status['sessions']} now, {status['sessions_total']} so far, {status['rows_total']} rows"),
        ("connections", str(status["connections"])),
        ("files", _files_words(status["files"])),
        ("gossip", _gossip_words(status["gossip"])),
        *((each["what"], each["found"]) for each in status["discovery"] if each["used"]),
        ("receipts", str(status["receipts"])),
        ("up", f"{status['uptime_s']:.0f} s"),
    ]
    show_table(("", ""), rows)


def _computing(status: dict[str, Any]) -> list[tuple[str, str]]:
    if status["model"] is None:
        return []
    threads = status["threads"]
    rows = [("computed by", f"{status['back_end']}, {threads} thread{'' if threads == 1 else 's'}")]
    rows.append(("memory", _memory_words(status["memory"])))
    rows.append(("wire", _granted_words(status["wire"])))
    owner = status["owner"]
    return rows if owner["mode"] == "full" else [*rows, ("for others", f"{owner['mode']}: {owner['reason']}")]


def _files_words(files: dict[str, Any] | None) -> str:
    """What others can fetch here, and what went out."""
    seeding = [] if files is None else files["seeding"]
    if files is None or not seeding:
        return "none given to others"
    names = ", ".join(f"{each['model']}{'' if each['whole'] else ' (in part)'}" for each in seeding[:3])
    more = f" and {len(seeding) - 3} more" if len(seeding) > 3 else ""
    limit = files["up_limit_bytes_s"]
    slowly = "" if limit is None else f", at most {size_words(limit)}/s now"
    port = f", TCP port {files['torrent_port']}" if files["torrent_port"] else ""
    return f"{names}{more} given to others{port}; {size_words(files['sent_bytes'])} sent{slowly}"


def _role_words(status: dict[str, Any]) -> str:
    """What it is there for; only the roles that are ready are ever said: client, seeder, server and standby."""
    has_layers = status["model"] is not None
    going = f", going over to the layers {status['next_layers']}" if has_layers and status["next_layers"] else ""
    stays = "" if not has_layers or status["moves"] else ", of these layers only"
    return f"{status['role']}{stays}{going}{f': {reason}' if (reason := status['role_reason']) else ''}"


def _memory_words(memory: dict[str, int], load: str = "") -> str:
    """As llama.cpp took it, with about what the program itself takes beside it: `models show` counts alike, before."""
    parts = ("weights_bytes", "kv_bytes", "compute_bytes", "saved_bytes", "program_bytes")
    weights, kv, compute, saved, program = (size_words(memory[part]) for part in parts)
    states = f", {saved} of states to go back to" if memory["saved_bytes"] else ""
    total = size_words(sum(memory[part] for part in parts))
    return (
        f"{total}: {weights} of weights, {kv} of K and V{load}, {compute} of work space{states}, {program} of program"
    )


def _granted_words(wire: dict[str, str]) -> str:
    """In which dtype this peer's requests have rows sent between peers, where its own model is asked for."""
    asked, granted = wire["asked"], wire["granted"]
    if asked == granted:
        return granted
    return f"{granted}, the narrowest proved here" if asked == "auto" else f"{granted}: {asked} is not proved here"


def show_bench(result: dict[str, Any]) -> None:
    threads = result["threads"]
    print(f"{result['model']}, layers {result['layers']} of {result['n_layers']}")
    print(f"{result['back_end']}, {threads} thread{'' if threads == 1 else 's'}, numclass {result['numclass']}\n")
    rows = [
        (f"decode, {turn['sessions']} at a time", f"{turn['us_per_layer']} µs", f"{turn['tokens_per_s']:.1f}")
        for turn in result["decode"]
    ]
    rows.append(("prompt", f"{result['prefill_us_per_row_layer']} µs a row", f"{result['prefill_tokens_per_s']:.1f}"))
    show_table(("", "a layer", "tokens/s through these layers"), rows)
    memory = result["memory"]
    load = f" for {memory['sessions']} sessions of {memory['n_ctx']} positions"
    print(f"\nMemory: {_memory_words(memory, load)}.")
    if result["step_us_by_threads"]:
        print()
        show_table(
            ("threads", "a decode step"), [(str(n), f"{us} µs") for n, us in result["step_us_by_threads"].items()]
        )
    if result["beside_a_running_peer"]:
        print("\nA peer is running in this folder: these figures are of what it leaves.")


def _gossip_words(gossip: dict[str, int]) -> str:
    n_near, n_watching, n_reports = gossip["neighbours"], gossip["watchers"], gossip["reports"]
    words = f"{n_near} neighbour{'' if n_near == 1 else 's'}, {n_watching} of them "
    words += f"watch{'es' if n_watching == 1 else ''} this peer; {n_reports} load report{'' if n_reports == 1 else 's'}"
    words += f", {gossip['draining']} leaving" if gossip["draining"] else ""
    words += f", {gossip['gone']} gone" if gossip["gone"] else ""
    outdated = gossip.get("outdated", 0)
    return words + (f"; {outdated} need a newer meshswarm to be heard" if outdated else "")


def show_peers(peers: list[dict[str, Any]]) -> None:
    if not peers:
        print("No other peer is known yet.")
        return
    rows = []
    for peer in peers:
        rtt = "" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.1f} ms"
        serves = ", ".join(f"{entry['layers']} of {entry['model']}" for entry in peer["serves"])
        rows.append((peer["peer_id"][:SHORT_ID], rtt, serves, *_faring(peer)))
    show_table(("peer", "rtt", "serves", "is", "load"), rows)
    print()
    for peer in peers:  # each whole on a line of its own, to be copied
        print(peer["peer_id"])
        print(f"  at {', '.join(peer['addresses'])}")


def _faring(peer: dict[str, Any]) -> tuple[str, str]:
    """How a peer fares, as far as is heard: whether it lives, and what it has to do."""
    load = peer["load"]
    if load is None:
        return ("" if peer["liveness"] == "unknown" else peer["liveness"]), ""
    sessions = "idle" if not load["sessions"] else f"{load['sessions']} session{'' if load['sessions'] == 1 else 's'}"
    full = ", full" if load["role"] == "server" and not load["free_kv_tokens"] else ""
    return f"{peer['liveness']}, {load['role']}", f"{sessions}{full}"


def size_words(n_bytes: float) -> str:
    """A size for a person."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes:,.0f} bytes"


def show_proof(verified: dict[str, Any]) -> None:
    proof = verified["proof"]
    print(f"{verified['name']}: its parts {', '.join(proof['spans'])} compute bit for bit what the whole does.")
    print(f"It {verified['cuts']['sentence']}.\n")
    rows = [("itself, other chunks", *_divergence_words(proof["noise"]), "")]
    for result in proof["results"]:
        words = ("", "", "") if result["divergence"] is None else _divergence_words(result["divergence"])
        rows.append((str(result["dtype"]), *words, result["obstacle"] or "proved"))
    show_table((f"{proof['n_rows']} rows", "same best token", "KL, mean", "KL, 99 of 100", ""), rows)


def _divergence_words(divergence: dict[str, float]) -> tuple[str, str, str]:
    return f"{divergence['agreement']:.1%}", f"{divergence['mean_kl']:.2g}", f"{divergence['p99_kl']:.2g}"


def show_progress(done: int, total: int) -> None:
    """A line that rewrites itself, on a terminal only."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done / 1e6:.0f} of {total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)


def show_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{finding.verdict.value:>5}  {finding.what}: {finding.found}")
        if finding.advice:
            print(f"       -> {finding.advice}")

"""A plan as tables for a person: routes, what each figure rests on, and who was left out.

The rule this file keeps: the answer comes first, and nothing is cut.
"""

from __future__ import annotations

import shlex
from typing import Any

from meshswarm.commands.show import show_table, size_words


def show_plan(plan: dict[str, Any]) -> None:
    """Prints what `/meshswarm/plan` answered."""
    print(f"{plan['model']}, {plan['layers']} layers: {_load_words(plan)}\n")
    if plan["alone"] is not None:
        print(_sentence(plan["alone"]["sentence"]) + "\n")
    routes = plan["routes"]
    for number, route in enumerate(routes, 1):
        _show_route(route, f"Route {number}" if len(routes) > 1 else "Route")
    if len(routes) > 1 or plan["streams"] > 1:
        shared = "which share no peer" if plan["disjoint"] else "which share peers"
        which = f" over {len(routes)} routes, {shared}" if len(routes) > 1 else ""
        print(f"Together: {plan['tokens_per_s']:.1f} tokens/s{which}.\n")
    if plan["refusal"] is not None:
        placed = plan["streams_placed"]
        subject = "No route" if not placed else f"Room for {placed} of {plan['streams']} only"
        print(f"{subject}: {plan['refusal']}.\n")
        if not placed and not plan["left_out"]:
            print(
                "Nobody who serves any of it is known here. In a folder where no peer runs, this machine answers alone:"
                f'\n\n  meshswarm run --model {shlex.quote(plan["model"])} "PROMPT"\n'
            )
    if plan["alternatives"]:
        ways = "; ".join(f"{_way_words(way['hops'])} ({way['tpot_ms']:.1f} ms)" for way in plan["alternatives"])
        print(f"Kept for when a peer refuses: {ways}.\n")
    _show_left_out(plan["left_out"])


def _load_words(plan: dict[str, Any]) -> str:
    streams = "1 answer" if plan["streams"] == 1 else f"{plan['streams']} answers at the same time"
    return f"{streams}, {plan['context']} positions, a prompt of {plan['prompt']} tokens"


def _show_route(route: dict[str, Any], name: str) -> None:
    streams = "" if route["streams"] == 1 else f" for {route['streams']} answers"
    first = "the first one cannot be said: not every peer measured prompts"
    if route["ttft_ms"] is not None:
        basis = ", as peers claim to be at prompts" if route["ttft_is_claim"] else ""
        first = f"the first after {route['ttft_ms'] / 1e3:.2f} s{basis}"
    print(
        f"{name}{streams}: {route['tpot_ms']:.1f} ms a token ({1e3 / route['tpot_ms']:.1f} tokens/s each), {first}.\n"
        f"With nobody beside it: computing {route['compute_ms']:.1f} ms, the way {route['network_ms']:.1f} ms, waiting "
        f"{route['queue_ms']:.1f} ms."
    )
    rows = [_hop_row(hop) for hop in route["hops"]]
    back = route["way_back"]
    rows.append(("back to this peer", "", "", f"{back['ms']:.2f} ms ({back['basis']})", ""))
    show_table(("layers", "peer", "a layer", "the way there", "memory"), rows)
    print()


def _hop_row(hop: dict[str, Any]) -> tuple[str, str, str, str, str]:
    pages = ", from disk" if hop["pages"] else ""
    queue = f"; its queue {hop['queue_ms']:.1f} ms" if hop["queue_ms"] else ""
    speed = f"{hop['us_per_layer']:,.0f} µs{pages} ({hop['speed_basis']}){queue}"
    way = f"{hop['way_in']['ms']:.2f} ms ({hop['way_in']['basis']})"
    memory = hop["memory"]
    held = "not known" if memory is None else f"{size_words(memory['total'])}, K and V {size_words(memory['kv'])}"
    return hop["layers"], hop["peer"], speed, way, held


def _way_words(hops: list[dict[str, Any]]) -> str:
    return " -> ".join(f"{hop['layers']} on {hop['peer'][:8]}" for hop in hops)


def _show_left_out(left_out: list[dict[str, Any]]) -> None:
    if not left_out:
        return
    print("Left out:")
    rows = []
    for each in left_out:
        for at, change in enumerate(each["changes"]):
            rows.append((each["peer"], each["layers"], each["reason"], change) if not at else ("", "", "", change))
    show_table(("peer", "serves", "why", "what would change it"), rows)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."

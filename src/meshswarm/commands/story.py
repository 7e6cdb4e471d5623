"""A peer's events as sentences for the person at the terminal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from meshswarm.config import PUBLIC_SWARM

Event = Mapping[str, Any]


def sentence_of(event: Event) -> str:
    """What `event` means to a person; empty when it means nothing to one."""
    match event["event"]:
        case "started":
            swarm = _first_start(event) if event.get("first_start") else _swarm(event)
            return f"Peer {event['peer_id']}\nReachable as {event['address']}\n{swarm}"
        case "port-taken":
            return f"Port {event['port']} for {event['what']} is taken; using a free one instead."
        case "api-key":
            return f"API key, made now and kept in {event['path']}: {event['api_key']}"
        case "model" | "warning" | "notice" | "placed" | "role" | "moving":
            return str(event["message"])
        case "loading":
            return f"Loading layers {event['layers']} of {event['n_layers']} of {event['model']} ..."
        case "fetching":
            return _fetching(event)
        case "reading":
            done, total = event["bytes"], event["wanted_bytes"]
            return f"Reading: {100 * done // max(1, total)} % of {total / 1e6:.1f} MB"
        case "fetched":
            rate = f" ({event['bytes'] / event['seconds'] / 1e6:.1f} MB/s)" if event["seconds"] >= 1 else ""
            return f"Fetched {_what(event)}: {event['bytes'] / 1e6:.1f} MB in {event['seconds']:.1f} s{rate}."
        case "joined":
            return _joined(event)
        case "alone":
            return _alone(event)
        case "join-failed":
            return _join_failed(event)
        case "ready":
            return f"{_serving(event)}\n\n{_endpoint(event)}\n\nCtrl-C stops."
        case "complete":
            return f"All layers of {event['ask']} are served now.\n{_endpoint(event)}"
        case "moved":
            return _layers(event) if event["done"] else f"Serving the layers {event['layers']} on."
        case "owner":
            return _owner(event)
        case "draining":
            return _draining(event)
        case "interrupted":
            return _interrupted(event)
        case "stopping":
            return "Stopping ..."
        case "stopped":
            return "Stopped."
        case _:
            return ""


def _swarm(event: Event) -> str:
    if event["swarm"] != PUBLIC_SWARM:
        return f"Private swarm '{event['swarm']}'" if event.get("private") else f"Swarm '{event['swarm']}'"
    what = "" if event["model_ref"] is None else ": they compute on this machine, and their prompts pass through it"
    private = "among yourselves: `meshswarm swarm new NAME`, --private"
    return f"Swarm '{PUBLIC_SWARM}', open to strangers{what} ({private})"


def _first_start(event: Event) -> str:
    """What a newcomer should know, a line each."""
    lines = [_swarm(event)]
    if event["swarm"] == PUBLIC_SWARM:
        lines = [f"Swarm '{PUBLIC_SWARM}': the default, open to everybody. Another: --swarm NAME"]
        if event["model_ref"] is not None:
            lines.append(
                "Serving strangers: they compute on this machine, and their prompts pass through it. "
                "Among yourselves: `meshswarm swarm new NAME`, --private"
            )
    peers, programs = event["address"].rpartition(":")[2], event["api"].split("://")[1].partition("/")[0]
    lines.append(
        f"Ports: UDP {peers} for other peers and TCP {int(peers) + 1} for model files, to be let in by a firewall; "
        f"TCP {programs} for your programs"
    )
    if event["announced"]:
        lines.append(f"Announced: {', '.join(event['announced'])} (--no-lan, --no-rendezvous turn that off)")
    return "\n".join(lines)


def _joined(event: Event) -> str:
    n_peers = event["peers"]
    if event["through"] == "others":
        return f"Joined by {n_peers} peer{'' if n_peers == 1 else 's'}."
    return f"Joined: {n_peers} other peer{'' if n_peers == 1 else 's'} known, found through: {event['what']}."


def _what(event: Event) -> str:
    """The model, or the layers of it, that are fetched."""
    return f"the layers {event['layers']} of {event['model']}" if "layers" in event else str(event["model"])


def _fetching(event: Event) -> str:
    done, total = event["bytes"], max(1, event["wanted_bytes"])
    far = f"Fetching {_what(event)}: {100 * done // total} % of {total / 1e6:.1f} MB"
    return ", ".join((far, *pace_of(event, sources_of(event))))


def sources_of(event: Event) -> str:
    """From where it comes: empty while it comes from nowhere."""
    sources = [f"{event['peers']} peer{'' if event['peers'] == 1 else 's'}"] if event["peers"] else []
    sources += ["the web"] if event["web_bytes"] else []
    return " and ".join(sources)


def pace_of(event: Event, sources: str) -> list[str]:
    """How fast a fetch goes, from whom and how long it will take, as far as that is known."""
    if event["waits_s"] is not None:
        return [f"nobody gives it now; waiting up to {event['waits_s']:.0f} s"]
    rate = f"{event['bytes_s'] / 1e6:.1f} MB/s" if event["bytes_s"] else ""
    pace = f"{rate} from {sources}" if rate and sources else rate or (f"from {sources}" if sources else "")
    left = "" if event["eta_s"] is None else f"{event['eta_s']:.0f} s left"
    return [part for part in (pace, left) if part]


def _interrupted(event: Event) -> str:
    if "bytes" not in event:
        return "Stopped."
    far = f"{event['bytes'] / 1e6:.0f} of {event['wanted_bytes'] / 1e6:.0f} MB"
    return f"Stopped at {far}. What came is kept; the same command goes on from there."


def _alone(event: Event) -> str:
    tried = "; ".join(f"{each['what']}: {each['found'].replace('; ', ', ')}" for each in event["tried"])
    return f"No other peer found yet; looking on. Tried {tried}."


def _join_failed(event: Event) -> str:
    return f"No way in through {event['peer']} at {event['address']}; trying on. {what_to_check(event)}"


def what_to_check(event: Event) -> str:
    """What a person can do about a peer that could not be joined."""
    why = f"{event['why'][0].upper()}{event['why'][1:]}. " if event["why"] else ""
    return (
        f"{why}Is it running, with the same --swarm ({event['swarm']!r})? Is it the address it printed, and is that "
        "UDP port open in its firewall?"
    )


def _draining(event: Event) -> str:
    n_answers = event["answers"]
    given = "1 answer is still being given: waiting for it" if n_answers == 1 else ""
    given = given or f"{n_answers} answers are still being given: waiting for them"
    return f"{given}, {event['most_s']:.0f} s at most. Ctrl-C again ends at once."


def _owner(event: Event) -> str:
    match event["mode"]:
        case "paused":
            return f"Making room: {event['reason']}. Only this peer's own endpoint is served."
        case "throttled":
            return f"Slowing down: {event['reason']}."
        case _:
            return "Serving others at full speed again."


def _serving(event: Event) -> str:
    if event["model"] is None:
        return "No layers are served here: this peer only answers its own endpoint."
    granted = event["wire"]["granted"]
    wire = "" if granted == "f32" else f" Rows to other peers go in {granted}, as was proved here."
    return _layers(event) + wire


def _layers(event: Event) -> str:
    return (
        f"Serving layers {event['layers']} of {event['n_layers']} of {event['model']} "
        f"({event['us_per_layer']} µs a layer and token, {sum(event['memory'].values()) / 1e6:.0f} MB of memory)."
    )


def _endpoint(event: Event) -> str:
    lines = [f"OpenAI endpoint: {event['api']}"]
    if event["api_elsewhere"] is not None:
        lines.append(f"From other machines: {event['api_elsewhere']}")
    if event["api_key_path"] is not None:
        lines.append(f"It asks for the API key in {event['api_key_path']}")
    if event["ask"] is None:
        lines.append("No model is served in this swarm yet; the endpoint answers once one is.")
    elif event["missing"]:
        lines += ["", _missing(event)]
    else:
        lines += ["Try it:", "", _curl(event)]
    return "\n".join(lines)


def _missing(event: Event) -> str:
    missing = event["missing"]
    sentence = f"Nobody serves the layers {', '.join(missing)} of {event['ask']} yet; answers need them."
    if event["model_ref"] is None:
        return sentence
    where = "On another machine:"
    command = ["meshswarm", "serve", "--model", event["model_ref"], "--layers", missing[0]]
    if not event.get("gives_files", True):
        where = "On another machine that has the model's file, as this peer gives none:"
        command[3] = "FILE.gguf"
    command += ["--swarm", event["swarm"], "--join", event["address"]]
    return f"{sentence} {where}\n\n  {shlex.join(command)}"


def _curl(event: Event) -> str:
    body = json.dumps({"model": event["ask"], "messages": [{"role": "user", "content": "Hello!"}]})
    key = ""
    if event["api_key_path"] is not None:
        key = f' -H "Authorization: Bearer $(cat {shlex.quote(event["api_key_path"])})"'
    return f"  curl {event['api']}/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d '{body}'"

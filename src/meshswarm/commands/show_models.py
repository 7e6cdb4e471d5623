"""Models as tables for a person."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from meshswarm.artifacts.sources.shared import unfinished_downloads
from meshswarm.commands.publish import manifest_lines
from meshswarm.commands.show import show_table, size_words


def show_unfinished(folder: Path) -> None:
    """Downloads that all peers of this user share, as far as they are not whole."""
    for each in unfinished_downloads(folder):
        size = f"{size_words(each.n_bytes)} of {size_words(each.length)}"
        print(f"\nUnfinished download, {size}: {each.target}")
        print(
            f"The same pull goes on with it; meshswarm models rm --shared {shlex.quote(str(each.target))} removes it."
        )


def show_models(models: list[dict[str, Any]]) -> None:
    if not models:
        print("No model is known yet; get the small default one with `meshswarm models pull`.")
        return
    is_known = any("ready" in model for model in models)  # a peer is running and sees its swarm
    rows = []
    for model in models:
        size = size_words(model["bytes"]) if "bytes" in model else "not known"
        row = (_name_words(model), str(model["layers"]), size, _here_words(model), _disk_words(model))
        rows.append((*row, _served_words(model)) if is_known else row)
    headings = ("model", "layers", "size", "on this disk", "own copies")
    show_table((*headings, "served") if is_known else headings, rows)


def _name_words(model: dict[str, Any]) -> str:
    alias = model.get("published_as")
    return f"{model['name']} (published as {alias})" if alias else str(model["name"])


def _served_words(model: dict[str, Any]) -> str:
    if "ready" not in model or not (model["ready"] or model["covered"]):
        return "nobody"
    return "all" if model["ready"] else f"layers {', '.join(model['covered'])}"


def _here_words(model: dict[str, Any]) -> str:
    if model.get("gone_files"):
        return f"file is gone: {', '.join(model['gone_files'])}"
    if model.get("is_touched"):
        return f"changed since? run `meshswarm models verify {model['name']}`"
    if model["local"]:
        return "whole"
    if not model.get("held_bytes"):
        return "slices alone" if model.get("disk", {}).get("slices") else "no"
    return f"{size_words(model['held_bytes'])} of it"


def _disk_words(model: dict[str, Any]) -> str:
    """What this peer made itself; files imported in place are the person's own."""
    disk = model.get("disk", {})
    parts = [f"{size_words(disk[kind])} {kind}" for kind in ("pieces", "slices") if disk.get(kind)]
    return ", ".join(parts) or "none"


def show_imported(model: dict[str, Any]) -> None:
    show_model(model)
    if model["in_place"]:
        what = "It is used where it is" if len(model["in_place"]) == 1 else "They are used where they are"
        print(f"{what}: do not move or change {', '.join(model['in_place'])}.")


def show_model(model: dict[str, Any]) -> None:
    files = f" in {model['files']} files" if model["files"] > 1 else ""
    print(f"{model['name']}: {model['layers']} layers, {model['bytes'] / 1e6:.0f} MB{files}\nid {model['model_id']}")


def show_verified(models: list[dict[str, Any]]) -> None:
    if not models:
        print("No model is stored here.")
    for model in models:
        checked = sum(file["checked_bytes"] for file in model["files"] if not file["gone"])
        if model["good"] and not checked:
            print(f"{model['name']}: nothing of its file is here; slices are checked when they are loaded")
        elif any(file["gone"] for file in model["files"]):
            print(f"{model['name']}: its file is gone; import it from where it is now, or `meshswarm models rm` it")
        else:
            print(f"{model['name']}: {'good' if model['good'] else 'DAMAGED'}, {size_words(checked)} checked")
        for file in model["files"]:
            if file["gone"]:
                print(f"  {file['path']}: gone")
            elif file["bad_bytes"]:
                print(f"  {file['path']}: {size_words(file['bad_bytes'])} are bad, {_piece_words(file['bad_pieces'])}")


def _piece_words(pieces: list[int]) -> str:
    shown = ", ".join(map(str, pieces[:20]))
    more = f" and {len(pieces) - 20} more" if len(pieces) > 20 else ""
    return f"in piece{'' if len(pieces) == 1 else 's'} {shown}{more}"


def show_removed(removed: dict[str, Any]) -> None:
    freed = f"; {size_words(removed['freed_bytes'])} are free again" if removed["freed_bytes"] else ""
    print(f"{removed['name']} is removed{freed}.")
    for path in removed["kept_files"]:
        if path in removed["shared_files"]:
            print(f"{path} is shared by all peers of this user: it stays where it is.")
            print(f"If no other peer needs it: meshswarm models rm --shared {shlex.quote(path)}")
        else:
            print(f"{path} was imported in place: it stays where it is.")


def show_facts(facts: dict[str, Any]) -> None:
    kv, whole, load = facts["kv"], facts["whole"], facts["load"]
    smallest, largest = min(facts["layer_bytes"]), max(facts["layer_bytes"])
    each = size_words(largest) if smallest == largest else f"{size_words(smallest)} to {size_words(largest)}"
    state = f", and {size_words(kv['session_bytes'])} a session" if kv["session_bytes"] else ""
    guess = "" if kv["is_exact"] else " (as for plain attention: this architecture was never measured)"
    manifest = facts["manifest"]
    alias = f" (published as {manifest['name']})" if manifest and manifest["name"] != facts["name"] else ""
    rows = [
        (
            "model",
            f"{facts['name']}{alias}, {facts['architecture']}, mostly {facts['encoding']}, "
            f"{size_words(facts['bytes'])}",
        ),
        ("id", facts["model_id"]),
        ("layers", f"{facts['layers']} of {each}, and {size_words(facts['outer_bytes'])} outside them"),
        ("cuts", facts["cuts"]["sentence"]),
        ("context", f"{facts['n_ctx']} positions at most"),
        ("K and V", f"{size_words(kv['token_bytes'])} a position{state}{guess}"),
        ("wire", _wire_words(facts)),
        ("disk", _stored_words(facts["disk"], facts["bytes"])),
        (
            "memory",
            f"{size_words(whole['total'])} at most for all of it and {load['sessions']} sessions of {load['n_ctx']} "
            "positions: "
            f"{size_words(whole['weights'])} of weights, {size_words(whole['kv'])} of K and V, up to "
            f"{size_words(whole['work'])} of work space, {size_words(whole['program'])} of program",
        ),
    ]
    rows += manifest_lines(manifest) if manifest else []
    show_table(("", ""), rows)
    plan = facts["plan"]
    if plan is None:
        return
    print()
    if plan["refusal"] is not None:
        print(plan["refusal"][0].upper() + plan["refusal"][1:] + ".")
        return
    parts = [
        (
            str(part["peer"] + 1),
            size_words(part["room"]),
            part["layers"],
            size_words(part["total"]),
            size_words(part["kv"]),
        )
        for part in plan["spans"]
    ]
    show_table(("peer", "has", "layers", "takes", "of that K and V"), parts)


def _stored_words(disk: dict[str, Any], n_bytes: int) -> str:
    """Where the model lies, and what this peer's own copies take."""
    held = disk["held_bytes"]
    parts = [] if disk["gone_files"] else ["not here"]
    if held:
        parts = ["whole" if held == n_bytes else f"{size_words(held)} of it"]
    parts += [f"{size_words(disk['pieces'])} of pieces"] if disk["pieces"] else []
    parts += [f"slice {each['layers']} of {size_words(each['bytes'])}" for each in disk["slices"]]
    files = [f"{path} is gone" if path in disk["gone_files"] else path for path in disk["files"]]
    return "; ".join([*parts, *files])


def _wire_words(facts: dict[str, Any]) -> str:
    sizes = facts["row_bytes"]
    proved = ", ".join(f"{dtype} ({sizes[dtype]} bytes a row)" for dtype in facts["wire"]["proved"])
    proof = facts["wire"]["proof"]
    if proof is None:
        return f"{proved}; `meshswarm models prove` may prove narrower ones"
    if facts["wire"]["is_current"]:
        return proved
    return f"{proved}; what was proved with llama-cpp-python {proof['build']} has to be proved again on this build"

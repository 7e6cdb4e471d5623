"""The commands. Each parses its arguments, calls one thing, and shows the result: a table, or `--json`.

The rule this file keeps: a person never sees a traceback. Every MeshswarmError is printed as its sentence, with exit
code 1; a wrong argument is exit code 2.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meshswarm import __version__
from meshswarm.commands.control import RunningPeer, find_running
from meshswarm.commands.models_cli import models_app
from meshswarm.commands.options import (
    REF_HELP,
    Join,
    JoinOrInvite,
    Json,
    Llama,
    Private,
    llama_options,
    parse_join,
    parse_rate,
    parsed,
    show_result,
)
from meshswarm.commands.swarm_cli import swarm_app
from meshswarm.config import DEFAULT_MODEL, Address, Home, WireChoice, default_home, parse_size
from meshswarm.discovery.settings import DiscoverySettings, Use
from meshswarm.errors import ConfigError, MeshswarmError
from meshswarm.head.request import Speculation
from meshswarm.head.sampling_params import MAX_TEMPERATURE
from meshswarm.identity import Identity

app = typer.Typer(
    name="meshswarm",
    help="A peer-to-peer swarm that runs language models no single member could hold. Start with: meshswarm --auto",
    epilog="`meshswarm --auto ...` is short for `meshswarm serve --auto ...`: a peer that chooses model and layers by "
    "itself, with the options of `meshswarm serve --help`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(models_app, name="models")
app.add_typer(swarm_app, name="swarm")

Model = Annotated[str | None, typer.Option("--model", help=REF_HELP)]
Swarm = Annotated[str | None, typer.Option("--swarm", help="The swarm's name; peers of different swarms never meet.")]
Lan = Annotated[
    bool | None, typer.Option("--lan/--no-lan", help="Find peers on the local network by mDNS; never for loopback.")
]
Rendezvous = Annotated[
    bool | None,
    typer.Option("--rendezvous/--no-rendezvous", help="Find peers through BitTorrent's DHT; public swarms by default."),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option("--rendezvous-node", help="HOST:PORT of a DHT node to start from, in a closed network."),
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    home: Annotated[Path | None, typer.Option("--home", help="The peer's folder (or MESHSWARM_HOME).")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"meshswarm {__version__}")
        raise typer.Exit
    context.obj = Home(home if home is not None else default_home())


def _discovery(lan: bool | None, rendezvous: bool | None, nodes: list[str] | None) -> DiscoverySettings:
    named = tuple(parsed("--rendezvous-node", Address.parse, text) for text in nodes or ())
    return DiscoverySettings(Use.of_switch(lan), Use.of_switch(rendezvous), named)


# -- running a peer


@app.command()
def serve(
    context: typer.Context,
    auto: Annotated[bool, typer.Option("--auto", help="Choose model and layers by itself.")] = False,
    model: Model = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Serve only layers A:B, counted from 0.")] = None,
    rebalance: Annotated[
        bool | None,
        typer.Option("--rebalance/--pin", help="Go over to layers that need a holder more, as --auto does; or never."),
    ] = None,
    join: JoinOrInvite = None,
    swarm: Swarm = None,
    private: Private = False,
    listen: Annotated[str | None, typer.Option("--listen", help="UDP address for peers; port 0 takes any.")] = None,
    lan: Lan = None,
    rendezvous: Rendezvous = None,
    rendezvous_node: Nodes = None,
    api: Annotated[str | None, typer.Option("--api", help="Where the OpenAI endpoint listens.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Use at most this much, for example 6GB, the program included.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=512, help="Threads for computing.")] = None,
    ctx: Annotated[int | None, typer.Option("--ctx", min=64, max=1 << 24, help="Positions per session.")] = None,
    sessions: Annotated[int, typer.Option("--sessions", min=1, max=128, help="Sessions at the same time.")] = 4,
    llama: Llama = None,
    yields: Annotated[
        bool, typer.Option("--yield", help="Make room for this machine's other programs, and rest on battery.")
    ] = False,
    speculation: Annotated[
        Speculation, typer.Option("--speculation", help="Guess tokens ahead as far as it pays, or never.")
    ] = Speculation.AUTO,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="A small model of the same vocabulary that helps to guess.")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, max=100, help="Seconds a request may stand in line when peers are full.")
    ] = 60.0,
    wire: Annotated[
        WireChoice, typer.Option("--wire", help="How rows go between peers, where `models prove` proved it.")
    ] = WireChoice.F32,
    no_seed: Annotated[bool, typer.Option("--no-seed", help="Give no model files to other peers.")] = False,
    slice_only: Annotated[
        bool, typer.Option("--slice-only", help="Of what is fetched keep the slice alone, and give nothing on.")
    ] = False,
    disk: Annotated[
        str | None, typer.Option("--disk", help="What this peer's own copies may take, for example 40GB.")
    ] = None,
    upload_rate: Annotated[
        str | None, typer.Option("--upload-rate", help="Give model files at most so fast, for example 5MB/s.")
    ] = None,
    download_rate: Annotated[
        str | None, typer.Option("--download-rate", help="Fetch model files at most so fast, for example 20MB/s.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a peer in the foreground until Ctrl-C. Without a model it serves no layers and only answers its own API."""
    from meshswarm.commands.serve import serve_forever
    from meshswarm.commands.swarm import enter_invited
    from meshswarm.fetching.rates import Limits
    from meshswarm.fetching.sharing import SharingSettings
    from meshswarm.peer import PeerSettings
    from meshswarm.serving import ServingSettings
    from meshswarm.span import Span

    serving = ServingSettings(
        model=model or DEFAULT_MODEL,
        span=None if layers is None else parsed("--layers", Span.parse, layers),
        memory_bytes=None if memory is None else parsed("--memory", parse_size, memory),
        n_threads=threads,
        n_ctx=ctx,
        n_sessions=sessions,
        llama_options=llama_options(llama),
        yields=yields,
        is_auto=auto and model is None and layers is None,
        is_mobile=layers is None and (auto if rebalance is None else rebalance),
        slice_only=slice_only,
        waits=True,
    )
    if rebalance and layers is not None:
        raise typer.BadParameter("layers that were asked for are not exchanged for others", param_hint="--rebalance")
    is_serving = model is not None or auto or layers is not None or bool(rebalance)
    if is_serving and model is None and not serving.is_auto and not as_json:
        typer.echo(f"No --model was given: it is the small embedded one, {DEFAULT_MODEL}.")
    join, swarm, private = enter_invited(context.obj, join, swarm, private)
    settings = PeerSettings(
        home=context.obj,
        swarm=swarm,
        private=private,
        discovery=_discovery(lan, rendezvous, rendezvous_node),
        listen=None if listen is None else parsed("--listen", Address.parse, listen),
        api=None if api is None else parsed("--api", Address.parse, api),
        join=tuple(parsed("--join", parse_join, text) for text in join or ()),
        serving=serving if is_serving else None,
        speculation=speculation,
        wire=wire,
        draft_model=draft_model,
        max_wait_s=wait,
        sharing=SharingSettings(
            seeds=not no_seed,
            limits=Limits(
                down_bytes_s=0 if download_rate is None else parsed("--download-rate", parse_rate, download_rate),
                up_bytes_s=0 if upload_rate is None else parsed("--upload-rate", parse_rate, upload_rate),
            ),
            disk_bytes=None if disk is None else parsed("--disk", parse_size, disk),
        ),
    )
    raise typer.Exit(serve_forever(settings, as_json=as_json))


@app.command()
def run(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The question.")],
    model: Model = None,
    join: Join = None,
    swarm: Annotated[str | None, typer.Option("--swarm", help="The swarm to ask in.")] = None,
    private: Private = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Stop after so many tokens.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=MAX_TEMPERATURE)] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Repeatable sampling.")] = None,
    as_json: Json = False,
) -> None:
    """Ask one question: of the peer running in this folder, or of one started just for it."""
    from meshswarm.commands.ask import Question, ask
    from meshswarm.commands.throwaway import Where

    if not prompt.strip():
        raise typer.BadParameter("the question is empty", param_hint="PROMPT")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "temperature": temperature}
    for name, value in (("model", model), ("max_tokens", max_tokens), ("seed", seed)):
        if value is not None:
            body[name] = value
    peers = tuple(parsed("--join", parse_join, text) for text in join or ())
    ask(Question(Where(context.obj, swarm, private, peers), model, body), as_json=as_json)


# -- looking at a peer


def _running(home: Home) -> RunningPeer:
    peer = find_running(home)
    if peer is None:
        raise ConfigError(f"no peer is running in the folder {home.root}; start one with `meshswarm --auto`")
    return peer


@app.command()
def status(context: typer.Context, as_json: Json = False) -> None:
    """What the peer in this folder is doing."""
    from meshswarm.commands.show import show_status

    show_result(_running(context.obj).get("/meshswarm/status"), as_json, show_status)


@app.command()
def peers(context: typer.Context, as_json: Json = False) -> None:
    """The peers this one knows, and what they serve."""
    from meshswarm.commands.show import show_peers

    show_result(_running(context.obj).get("/meshswarm/peers"), as_json, show_peers)


@app.command(name="id")
def identify(context: typer.Context, as_json: Json = False) -> None:
    """This peer's PeerId (made on first use)."""
    home = context.obj.create()
    value = {"peer_id": str(Identity.load_or_create(home.key).peer_id), "home": str(home.root)}
    show_result(value, as_json, lambda v: typer.echo(v["peer_id"]))


@app.command()
def doctor(
    context: typer.Context,
    swarm: Swarm = None,
    private: Private = False,
    join: Join = None,
    lan: Lan = None,
    rendezvous: Rendezvous = None,
    rendezvous_node: Nodes = None,
    as_json: Json = False,
) -> None:
    """Check this machine and this folder, look for peers for some seconds, and say what to do about what is wrong."""
    from meshswarm.commands.doctor import examine
    from meshswarm.commands.network import Search, examine_network
    from meshswarm.commands.show import show_findings

    discovery = _discovery(lan, rendezvous, rendezvous_node)
    peers = tuple(parsed("--join", parse_join, text) for text in join or ())
    findings = [*examine(context.obj), *examine_network(Search(context.obj, swarm, private, peers, discovery))]
    show_result([finding.as_json() for finding in findings], as_json, lambda _: show_findings(findings))
    if any(finding.is_failure for finding in findings):
        raise typer.Exit(1)


@app.command()
def bench(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help=REF_HELP)] = DEFAULT_MODEL,
    layers: Annotated[str | None, typer.Option("--layers", help="Only layers A:B, counted from 0.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=512, help="Threads for computing.")] = None,
    llama: Llama = None,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine computes a model's layers: what a peer would announce."""
    from meshswarm.commands.bench import BenchSettings
    from meshswarm.commands.bench import bench as measure
    from meshswarm.commands.show import show_bench
    from meshswarm.span import Span

    span = None if layers is None else parsed("--layers", Span.parse, layers)
    options = llama_options(llama)
    show_result(measure(context.obj, BenchSettings(ref, span, threads, options)), as_json, show_bench)


@app.command()
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=REF_HELP)],
    n_ctx: Annotated[
        int | None, typer.Option("--context", min=2, max=1 << 24, help="Positions a session needs.")
    ] = None,
    n_prompt: Annotated[int | None, typer.Option("--prompt", min=1, max=1 << 24, help="Tokens of its prompt.")] = None,
    n_streams: Annotated[int, typer.Option("--streams", min=1, max=256, help="Answers at the same time.")] = 1,
    join: Join = None,
    swarm: Annotated[str | None, typer.Option("--swarm", help="The swarm to ask in.")] = None,
    private: Private = False,
    as_json: Json = False,
) -> None:
    """What answers would go through now, how fast, and why not through the other peers."""
    from meshswarm.commands.plan import PlanQuestion
    from meshswarm.commands.plan import plan as make_plan
    from meshswarm.commands.show import show_progress
    from meshswarm.commands.show_plan import show_plan
    from meshswarm.commands.throwaway import Where

    peers = tuple(parsed("--join", parse_join, text) for text in join or ())
    question = PlanQuestion(Where(context.obj, swarm, private, peers), model, n_ctx, n_prompt, n_streams)
    show_result(make_plan(question, None if as_json else show_progress), as_json, show_plan)


def main() -> None:
    """Entry point: `meshswarm --auto ...` means `meshswarm serve --auto ...`."""
    arguments = _with_command(sys.argv[1:])
    try:
        app(args=arguments, prog_name="meshswarm")
    except MeshswarmError as error:
        _complain(str(error), as_json="--json" in arguments)
        sys.exit(1)
    except OSError as error:  # a disk that is full, a folder that went away
        _complain(str(error), as_json="--json" in arguments)
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


def _with_command(arguments: list[str]) -> list[str]:
    """What a person meant: `meshswarm --auto` is `meshswarm serve --auto`, `--home DIR` may stand anywhere, and
    `meshswarm help` is `meshswarm --help`."""
    home, rest = _home_first(arguments)
    if rest == ["help"]:
        rest = ["--help"]
    elif rest and rest[0].startswith("--") and rest[0] not in ("--help", "--version"):
        rest = ["serve", *rest]
    return [*home, *rest]


def _home_first(arguments: list[str]) -> tuple[list[str], list[str]]:
    """`--home` with its value, and everything else."""
    for at, argument in enumerate(arguments):
        if argument == "--home" and at + 1 < len(arguments):
            return arguments[at : at + 2], [*arguments[:at], *arguments[at + 2 :]]
        if argument.startswith("--home="):
            return [argument], [*arguments[:at], *arguments[at + 1 :]]
    return [], arguments


def _complain(message: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"error": message}))
    else:
        typer.echo(f"meshswarm: {message}", err=True)

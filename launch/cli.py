"""The command line: `thinpipe train run.toml`."""

import io
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.resume import Resume, after_restart
from thinpipe.launch.checkpoint.run_folder import check_folder, earlier_runs
from thinpipe.launch.config.cli_options import (
    RanksOption,
    RestartsOption,
    SetOption,
    check_endpoint,
    refuse,
    run_app,
    share_of,
)
from thinpipe.launch.config.placement import hosts_by_rank
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.corpus import check_data, with_sizes
from thinpipe.launch.distributed.elastic import (
    Nodes,
    keep_freed_memory,
    run_local,
    run_node,
    started_by_launcher,
)
from thinpipe.launch.distributed.fork_server import end_with_parent
from thinpipe.launch.distributed.handshake import HandshakeError, versions
from thinpipe.launch.distributed.session import SHOW
from thinpipe.launch.doctor.cli import doctor
from thinpipe.launch.host.links import parse_rate, parse_time
from thinpipe.launch.memory.check import check_host, show_host
from thinpipe.launch.overlay.cli import key
from thinpipe.launch.plan.cli import plan
from thinpipe.launch.plan.memory_budget import memory_notices, plan_memory, show_memory
from thinpipe.launch.plan.trace import trace_run
from thinpipe.launch.remote.cli import launch_on_hosts
from thinpipe.launch.run.ending import end_done, end_failed
from thinpipe.launch.run.report import report
from thinpipe.launch.run.script import look_at, run_as_rank
from thinpipe.launch.shaped.cli import shaped
from thinpipe.launch.starter.cli import init
from thinpipe.launch.train import train_rank
from thinpipe.launch.trained.cli import export_model, generate_text, show_samples
from thinpipe.launch.trained.model import check_start
from thinpipe.launch.writers.writer import check_writers
from thinpipe.pipeline.models.build import check_model

app = typer.Typer(
    name="thinpipe",
    help="Train transformers over slow networks, with every link compressed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Resume from the newest checkpoint in the run folder.")
]
ShowOption = Annotated[
    int,
    typer.Option(
        "--show", metavar="RANK", min=-1, help="Local rank that shows progress; -1: none."
    ),
]
NodesOption = Annotated[
    int, typer.Option(min=1, help="Number of machines; run the same command on each.")
]
RendezvousOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Rendezvous address, on one of the machines."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(", ".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the versions that peers compare, and exit.",
        ),
    ] = False,
) -> None:
    """Train transformers over slow networks, with every link compressed."""


@app.command()
def train(  # noqa: PLR0913  # one parameter per option
    config_path: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="Run file.")],
    overrides: SetOption = None,
    resume: ResumeOption = False,
    step: Annotated[
        int | None,
        typer.Option("--step", help="With --resume: step of the checkpoint to use."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the run needs of memory, and exit.")
    ] = False,
    show: ShowOption = 0,
    nnodes: NodesOption = 1,
    rdzv: RendezvousOption = None,
    ranks: RanksOption = None,
    max_restarts: RestartsOption = 0,
) -> None:
    """Train. Starts all ranks on this machine, or with --nnodes its share of them.

    Under torchrun it runs a single rank.
    """
    try:
        check_endpoint(nnodes, rdzv, ranks)
        config = load_config(config_path, overrides or [])
        if show >= config.world_size:
            raise ConfigError(f"--show = {show}: use a rank below {config.world_size}, or -1")
        if step is not None and not resume:
            raise ConfigError(f"--step = {step}: needs --resume; add it, or remove --step")
    except ValueError as error:
        refuse(error)
    if dry_run:
        _show_memory(config, resume=resume)
        return
    if started_by_launcher():
        _run_rank(config, after_restart(Resume(resume, step)), show=show)
    if nnodes == 1 and rdzv is None:
        sys.exit(_run_all(config, resume=resume, max_restarts=max_restarts))
    placed = hosts_by_rank(config.pipeline.placement)
    nodes = Nodes(nnodes, rdzv or "", max_restarts, config.pipeline.peer_timeout_s, placed)
    sys.exit(_run_here(config, nodes, ranks))


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_script(  # one parameter per option
    script: Annotated[
        Path, typer.Argument(metavar="PROGRAM.PY", help="Program that makes a thinpipe.Run.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Of the program.")
    ] = None,
    show: ShowOption = 0,
    nnodes: NodesOption = 1,
    rdzv: RendezvousOption = None,
    ranks: RanksOption = None,
    max_restarts: RestartsOption = 0,
) -> None:
    """Run a Python program of one's own on all ranks. Options go before the program."""
    own = arguments or []
    if started_by_launcher():
        end_with_parent()
        keep_freed_memory()
        os.environ.setdefault(SHOW, str(show))
        run_as_rank(script, own)
    try:
        check_endpoint(nnodes, rdzv, ranks)
        needs = look_at(script, own)
        if nnodes == 1 and rdzv is None:
            sys.exit(run_local(main, sys.argv[1:], needs.world_size, max_restarts=max_restarts))
        nodes = Nodes(nnodes, rdzv or "", max_restarts, needs.join_s)
        processes = share_of(needs.world_size, nodes.count, ranks)
        sys.exit(run_node(main, sys.argv[1:], processes, nodes, needs.network))
    except (ValueError, OSError, ImportError) as error:
        refuse(error)


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a finished run.")],
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Link rate of the predicted step, as in 100mbit."),
    ] = None,
    delay: Annotated[
        str,
        typer.Option(metavar="TIME", help="One-way link delay of the predicted step, as in 20ms."),
    ] = "0ms",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output file; by default RUN_FOLDER/trace.json."),
    ] = None,
) -> None:
    """Write one step of a run as a Perfetto trace, with the predicted step for comparison."""
    try:
        rate_bps = parse_rate(rate, "--rate") if rate else None
        delay_s = parse_time(delay, "--delay")
        report = trace_run(folder, out or folder / "trace.json", rate_bps=rate_bps, delay_s=delay_s)
    except (ValueError, OSError) as error:
        refuse(error)
    print(report)


app.add_typer(key, name="key", no_args_is_help=True)
app.command("export")(export_model)
app.command("generate")(generate_text)
app.command("init")(init)
app.command("launch")(launch_on_hosts)
app.command("report")(report)
app.command()(plan)
app.command()(doctor)
app.command(context_settings={"allow_interspersed_args": False})(shaped)


def main() -> None:
    """The command line of this process; `launch/__main__.py` calls it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the user's locale lacks is shown as ?
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # dumps schedules
    run_app(app)


def _run_all(config: RunConfig, *, resume: bool, max_restarts: int) -> int:
    try:
        check_folder(config.run.path)
        check_writers(config)
        check_model(config.model)
        check_start(config)
        corpus = check_data(config)
        config = with_sizes(config)
        check_host(config, len(corpus.train), range(config.world_size))
        _check_resume(config, resume=resume)
    except (ValueError, OSError, ImportError) as error:
        refuse(error)
    return run_local(main, sys.argv[1:], config.world_size, max_restarts=max_restarts)


def _check_resume(config: RunConfig, *, resume: bool) -> None:
    if resume and not (config.run.path / "checkpoints").is_dir():
        remedy = "remove --resume"
        for earlier in earlier_runs(config.run.path)[-1:]:
            remedy += f", or rename {earlier}, an earlier run, to {config.run.path}"
        raise CheckpointError(f"{config.run.path}: no checkpoints to resume from; {remedy}")


def _show_memory(config: RunConfig, *, resume: bool) -> None:
    try:
        check_folder(config.run.path)
        check_writers(config)
        check_model(config.model)
        check_start(config)
        _check_resume(config, resume=resume)
        corpus = check_data(config)
        sequences = len(corpus.train)
        config = with_sizes(config)
        ends, ranks = plan_memory(config, sequences), range(config.world_size)
        show_memory(Console(highlight=False), config, ends, ranks)
        show_host(Console(highlight=False), config, sequences, ranks)
        for note in (*config.notices(), *corpus.notes, *memory_notices(ends)):
            typer.echo(note)
        check_host(config, sequences, ranks)
    except (ValueError, OSError, ImportError) as error:
        refuse(error)


def _run_here(config: RunConfig, nodes: Nodes, ranks: int | None) -> int:
    try:
        placed = nodes.placed.count(config.network.own_name())
        if placed and ranks not in (None, placed):
            raise ConfigError(
                f"--ranks = {ranks}: pipeline.placement gives this machine {placed}; remove --ranks"
            )
        processes = placed or share_of(config.world_size, nodes.count, ranks)
        check_folder(config.run.path)
        check_data(config)
        return run_node(main, sys.argv[1:], processes, nodes, config.network)
    except (ValueError, OSError, ImportError) as error:
        refuse(error)


def _run_rank(config: RunConfig, resume: Resume, *, show: int) -> NoReturn:
    end_with_parent()
    keep_freed_memory()
    os.environ[SHOW] = str(show)
    try:
        train_rank(config, resume, show=show)
        show_samples(config, shows=os.environ.get("LOCAL_RANK", "0") == str(show))
    except BaseException as error:
        end_failed(error, config, clear=(ValueError, HandshakeError))
    end_done()

"""The command line: `thinpipe train run.toml`."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.checkpoint import CheckpointError
from launch.config import ConfigError, RunConfig, load_config
from launch.handshake import HandshakeError
from launch.session import PeerError, TerminatedError
from launch.shaped.cli import shaped
from launch.spawn import end_with_parent, run_local, started_by_launcher

app = typer.Typer(
    name="thinpipe",
    help="Train transformers over slow networks, with every link compressed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FAILED, USAGE_ERROR, INTERRUPTED, TERMINATED = 1, 2, 130, 143


@app.callback()
def _main() -> None:
    """Train transformers over slow networks, with every link compressed."""


@app.command()
def train(
    config_path: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="What to train, and how.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run folder.")
    ] = False,
    show: Annotated[
        int, typer.Option("--show", metavar="RANK", help="Which rank of a machine draws progress.")
    ] = 0,
) -> None:
    """Train. Starts all ranks on this machine; under torchrun, runs as the rank it is."""
    try:
        config = load_config(config_path, overrides or [])
    except ConfigError as error:
        _refuse(error)
    if started_by_launcher():
        sys.exit(_run_rank(config, resume=resume, show=show))
    sys.exit(_run_all(config, resume=resume))


app.command(context_settings={"allow_interspersed_args": False})(shaped)


def main() -> None:
    """Entry point of `thinpipe` and `python -m launch`."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    app()


def _run_all(config: RunConfig, *, resume: bool) -> int:
    from launch.train import check_data  # torch.distributed.pipelining is slow to import

    for notice in config.notices():
        print(notice, file=sys.stderr, flush=True)
    try:
        check_data(config)
        if resume and not (config.run.path / "checkpoints").is_dir():
            raise CheckpointError(
                f"{config.run.path}: no checkpoints to resume from; leave out --resume"
            )
    except (ValueError, OSError, ImportError) as error:
        _refuse(error)
    return run_local(sys.argv[1:], config.world_size)


def _run_rank(config: RunConfig, *, resume: bool, show: int) -> int:
    from launch import train as loop

    end_with_parent()
    if not resume and os.environ.get("LOCAL_RANK", "0") == "0":
        _move_aside(config.run.path)  # before the handshake, hence before anyone writes
    try:
        loop.train(config, resume=resume, show=show)
    except PeerError as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)  # links are broken: a clean-up that talks to peers would hang
    except (ValueError, HandshakeError, ImportError) as error:
        _refuse(error)
    except TerminatedError:
        os._exit(TERMINATED)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    return 0


def _move_aside(folder: Path) -> None:
    """Rename the folder of an earlier run; two runs are never mixed, none is overwritten."""
    number = 1
    while (older := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):  # none, or a host with the same disk was faster
        folder.rename(older)
        print(f"{folder} held an earlier run; it is now {older}", flush=True)


def _refuse(error: Exception) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(USAGE_ERROR)

"""The command line: `thinpipe train run.toml`."""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from launch.checkpoint import CheckpointError
from launch.config import ConfigError, RunConfig, load_config
from launch.handshake import HandshakeError
from launch.plan.memory import check_memory, memory_table, plan_memory
from launch.session import PeerError, TerminatedError
from launch.shaped.cli import shaped
from launch.spawn import end_with_parent, keep_freed_memory, run_local, started_by_launcher
from launch.state import Resume, saved_so_far
from launch.train import check_data, train_rank

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
    step: Annotated[
        int | None, typer.Option("--step", help="With --resume: from this step's checkpoint.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the memories take, and start nothing.")
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
    if dry_run:
        _show_memory(config)
        return
    if started_by_launcher():
        sys.exit(_run_rank(config, Resume(resume, step), show=show))
    sys.exit(_run_all(config, resume=resume))


app.command(context_settings={"allow_interspersed_args": False})(shaped)


def main() -> None:
    """Entry point of `thinpipe` and `python -m launch`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # dumps schedules
    app()


def _run_all(config: RunConfig, *, resume: bool) -> int:
    try:
        corpus = check_data(config)
        check_memory(config, len(corpus.train), range(config.world_size))
        if resume and not (config.run.path / "checkpoints").is_dir():
            raise CheckpointError(
                f"{config.run.path}: no checkpoints to resume from; leave out --resume"
            )
    except (ValueError, OSError, ImportError) as error:
        _refuse(error)
    return run_local(sys.argv[1:], config.world_size)


def _show_memory(config: RunConfig) -> None:
    try:
        sequences = len(check_data(config).train)
        ends, ranks = plan_memory(config, sequences), range(config.world_size)
        Console().print(memory_table(config, ends, ranks))
        check_memory(config, sequences, ranks)
    except (ValueError, OSError, ImportError) as error:
        _refuse(error)


def _run_rank(config: RunConfig, resume: Resume, *, show: int) -> int:
    end_with_parent()
    keep_freed_memory()
    try:
        train_rank(config, resume, show=show)
    except PeerError as error:
        _say(f"rank {os.environ['RANK']}: {error}")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _say(saved_so_far(config))
        os._exit(FAILED)  # links are broken: a clean-up that talks to peers would hang
    except (ValueError, HandshakeError) as error:
        _refuse(error)
    except TerminatedError:
        os._exit(TERMINATED)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _say(saved_so_far(config))
        os._exit(INTERRUPTED)
    except Exception:
        _say(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}")
        os._exit(FAILED)
    return 0


def _refuse(error: Exception) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _say(f"error: {error}")
    sys.exit(USAGE_ERROR)


def _say(text: str) -> None:
    """Write whole lines at once: the ranks of a machine share its terminal."""
    os.write(2, f"{text}\n".encode())

"""The command line: `thinpipe train run.toml`."""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from launch.checkpoint import CheckpointError
from launch.config import ConfigError, RunConfig, load_config
from launch.export import ExportDtype, export
from launch.handshake import HandshakeError
from launch.session import PeerError, TerminatedError
from launch.shaped.cli import shaped
from launch.spawn import end_with_parent, run_local, started_by_launcher
from launch.state import Resume, saved_so_far
from launch.train import check_data, train_rank
from pipeline.models import check_model

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
        sys.exit(_run_rank(config, Resume(resume, step), show=show))
    sys.exit(_run_all(config, resume=resume))


@app.command("export")
def export_model(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the model.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Which checkpoint, if not the newest.")
    ] = None,
    dtype: Annotated[
        ExportDtype, typer.Option("--dtype", help="Of the weights; by default the source's.")
    ] = "source",
) -> None:
    """Write a run's model as a Hugging Face folder. LoRA is merged."""
    try:
        notes = export(run_folder, out, step=step, dtype=dtype)
    except (ValueError, OSError) as error:
        _refuse(error)
    else:
        typer.echo("\n".join([f"{out}: {notes[0]}", *notes[1:]]))


app.command(context_settings={"allow_interspersed_args": False})(shaped)


def main() -> None:
    """Entry point of `thinpipe` and `python -m launch`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # dumps schedules
    app()


def _run_all(config: RunConfig, *, resume: bool) -> int:
    try:
        check_model(config.model)
        check_data(config)
        if resume and not (config.run.path / "checkpoints").is_dir():
            raise CheckpointError(
                f"{config.run.path}: no checkpoints to resume from; leave out --resume"
            )
    except (ValueError, OSError, ImportError) as error:
        _refuse(error)
    return run_local(sys.argv[1:], config.world_size)


def _run_rank(config: RunConfig, resume: Resume, *, show: int) -> int:
    end_with_parent()
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

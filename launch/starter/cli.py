"""`thinpipe init`: writes a run file that starts as it stands."""

import re
from pathlib import Path
from typing import Annotated

import typer

from thinpipe.launch import preflight
from thinpipe.launch.config.cli_options import refuse
from thinpipe.launch.config.run import load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.resources import usable_cores
from thinpipe.launch.starter.draft import look
from thinpipe.launch.starter.template import render

_MOST_STAGES = 4


def init(
    path: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="File to write; none is overwritten.")
    ] = Path("run.toml"),
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Text, .tsv or .jsonl; or module:function of samples."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Hugging Face model folder; or module:function."),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stages; by default one per core.")
    ] = None,
) -> None:
    """Write a run file to begin with, from what can be found out."""
    try:
        notes = _write(path, model, data, stages or max(2, min(_MOST_STAGES, usable_cores())))
    except (ValueError, OSError, ImportError) as error:
        refuse(error)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"written: {path}; start it with `thinpipe train {path}`")


def _write(path: Path, model: str | None, data: str | None, stages: int) -> list[str]:
    """Check the text as a start would, and only then give the file its name; what to know of it.

    It may be for another machine, or for this one when less is running: that this one has no room
    for it now is only told.
    """
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: name a file that ends in .toml")
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path}: exists already; name a new file, or edit this one")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: no folder {path.parent}; create it, or name another file")
    name = re.sub(r"[^A-Za-z0-9_-]", "-", path.stem).lstrip("-.") or "run"
    partial = path.with_name(f".{path.name}.partial")
    found = look(model, data, stages)
    text = render(found, name, str(path))
    partial.write_text(text, encoding="utf-8")
    try:
        config = load_config(partial)
        whole = [range(config.world_size)]
        ready = preflight.check_settings(config, whole)
    except ValueError as error:
        raise ConfigError(str(error).replace(str(partial), str(path))) from None
    finally:
        partial.unlink()
    with path.open("x", encoding="utf-8") as file:  # which fails if another process was faster
        file.write(text)
    try:
        preflight.check_room(ready, whole)
    except ValueError as error:
        return [*found.notes, f"it cannot start here now: {error}"]
    return found.notes

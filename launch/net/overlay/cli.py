"""`thinpipe key`: makes the keys with which the machines of a run know each other."""

from pathlib import Path
from typing import Annotated

import typer

from thinpipe.launch.config.cli_options import reject
from thinpipe.launch.net.overlay import keys

key = typer.Typer(help="Make the keys with which the machines of a run know each other.")

DaysOption = Annotated[int, typer.Option(min=1, help="How long the key is valid, in days.")]


@key.command("new")
def new_key(
    path: Annotated[Path, typer.Argument(metavar="KEY", help="File to write, as in run.key.")],
    days: DaysOption = keys.DAYS,
) -> None:
    """Make a run's key. Whoever has the file can join the run."""
    try:
        keys.new(path, days=days)
    except (ValueError, OSError) as error:
        reject(error)
    typer.echo(
        f"{path}: written, for this user only. Copy it to every machine of the run "
        f"(scp {path} host1:thinpipe/), and name it in the run file, or in the environment of each "
        f'(export THINPIPE_KEY_FILE={path}):\n\n    [network]\n    key_file = "{path}"'
    )


@key.command("add")
def add_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The machine's name in the run.")],
    run_key: Annotated[
        Path, typer.Option("--run-key", metavar="KEY", help="The run's key, which signs it.")
    ] = Path("run.key"),
    days: DaysOption = keys.DAYS,
) -> None:
    """Make a key for one machine, which cannot use another name. Writes NAME.key."""
    path = Path(f"{name}.key")
    try:
        keys.add(run_key, name, path, days=days)
    except (ValueError, OSError) as error:
        reject(error)
    typer.echo(
        f"{path}: written. Move it to that machine (then {run_key} need not be there), and set "
        f'network.key_file = "{path}" and network.name = "{name}" on it'
    )

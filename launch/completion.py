"""All commands and options, without the seconds that importing torch takes.

`completion.json` lists them; `python -m thinpipe.launch.cli` writes it.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

LIST = Path(__file__).with_suffix(".json")


def skeleton(commands: Mapping[str, Any]) -> typer.Typer:
    """An app with these commands and options, which do nothing."""
    app = typer.Typer(name="thinpipe")
    for name, command in commands.items():
        if "commands" in command:
            app.add_typer(skeleton(command["commands"]), name=name, help=command["help"])
        else:
            app.command(name, help=command["help"])(_stub(command["options"]))
    app.callback()(_stub({}))
    return app


def _stub(options: Mapping[str, Any]) -> Callable[..., None]:
    def nothing(**_: object) -> None:
        """Only looked at."""

    parameters = []
    for number, (name, option) in enumerate(options.items()):
        kind: Any = bool if option["flag"] else str
        asked = typer.Option(name, help=option["help"])
        parameters.append(
            inspect.Parameter(
                f"option_{number}",
                inspect.Parameter.KEYWORD_ONLY,
                default=False if option["flag"] else "",
                annotation=Annotated[kind, asked],
            )
        )
    nothing.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(nothing)["__signature__"] = inspect.Signature(parameters)
    return nothing


def _commands(commands: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in commands.items():
        text = (command.help or "").split("\n")[0]
        if hasattr(command, "commands"):
            found[name] = {"help": text, "commands": _commands(command.commands)}
            continue
        options = {
            option.opts[0]: {"help": option.help or "", "flag": option.is_flag}
            for option in command.params
            if option.opts[0].startswith("--") and option.opts[0] != "--help"
        }
        found[name] = {"help": text, "options": options}
    return found


def written(commands: Mapping[str, Any]) -> str:
    """The content of `completion.json` as it should be for all commands of the command line."""
    return json.dumps(_commands(commands), indent=1) + "\n"

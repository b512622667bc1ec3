"""Writes the generated pages: every command and every setting.

They are made at every build, and kept in the repository for those who read them there; a test
compares them with the code.
"""

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.main import get_command

from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.gradcomp.registry import load_method, method_names
from thinpipe.launch.cli import all_commands
from thinpipe.launch.config.boundary import BoundaryConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.lab.cli import set_app
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.wire.told import DIRECTIONS

_ALSO: Mapping[type[BaseModel], Mapping[str, str]] = {PipelineConfig: {"cuts": r' \| `"auto"`'}}
"""What a field may be in a file although its type does not include it."""
_READ_AWAY: Mapping[type[BaseModel], str] = {
    PipelineConfig: '| `stages` | int | one more than `cuts` | needed with `cuts = "auto"` |'
}
"""Keys of a file that are no fields, as they are used up when it is read."""
_TOP = """## Above all tables

| key | type | default | |
|---|---|---|---|
| `extends` | str | none | another run file, relative to this one, that is read first |

Tables of both files are merged and lists replaced, this file's keys before the other's. A key set
to `""` is as if the other file did not set it, and `--set section.key=` as if no file did.
"""


def write(folder: Path) -> None:
    """Write the pages into `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "settings.md").write_text(_settings(), encoding="utf-8")
    (folder / "commands.md").write_text(_commands(), encoding="utf-8")


def _commands() -> str:
    commands = {"shaped set": get_command(set_app)}
    for name, command in all_commands().items():
        parts = getattr(command, "commands", {})
        commands |= {f"{name} {part}": found for part, found in parts.items()} or {name: command}
    parts = [
        "# Commands\n",
        "Every command and option, generated from the code; `--help` shows the same.\n",
        *(_command(name, command) for name, command in sorted(commands.items())),
    ]
    return "\n".join(parts)


def _command(name: str, command: Any) -> str:
    words, rows = ["thinpipe", name], []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            words.append(parameter.metavar)
        elif parameter.name != "help":
            value = "" if parameter.is_flag else f" {parameter.metavar or 'N'}"
            rows.append(f"| `{parameter.opts[0]}{value}` | {parameter.help} |")
    table = "\n".join(["| option | |", "|---|---|", *rows])
    return f"## {name}\n\n`{' '.join(words)}`\n\n{command.help}\n\n{table}\n"


def _settings() -> str:
    parts = [
        "# Settings\n",
        "Every key of a run file, generated from the code. Invalid settings are rejected before "
        "anything starts, with file, setting and a suggested fix. `--set section.key=value` "
        "overrides one of them.\n",
        _TOP,
    ]
    for name, field in RunConfig.model_fields.items():
        if name == "gradcomp":
            continue
        models = list(_models(field.annotation))
        several = typing.get_origin(field.annotation) is tuple
        head = f"[[{name}]]" if several else f"[{name}]"
        for number, model in enumerate(models):
            parts.append(_section(model, head if number == 0 else f"{head}, {model.__name__}"))
            if model is BoundaryConfig:
                parts += _kinds(model)
                continue
            parts += [
                _section(inner, f"{name}.{key}, {_kind(inner)}")
                for key, inner_field in model.model_fields.items()
                for inner in _models(inner_field.annotation)
            ]
    parts.append(
        "## [gradcomp]\n\nHow replicas exchange.\n\n"
        "| key | values | default | |\n|---|---|---|---|\n"
        f'| `method` | {", ".join(f"`{name}`" for name in method_names())} | `"allreduce"` | |\n'
    )
    parts.append(_section(ExchangeOptions, "[gradcomp.METHOD], of every method but demo and none"))
    parts += [_section(load_method(name).Config, f"[gradcomp.{name}]") for name in method_names()]
    return "\n".join(parts)


def _kinds(boundary: type[BaseModel]) -> Iterator[str]:
    """Both directions' kinds, each once, with what differs for gradients; then the other tables."""
    forward, backward = (
        {_kind(model): model for model in _models(boundary.model_fields[way].annotation)}
        for way in DIRECTIONS
    )
    for kind, model in forward.items():
        others = {
            name: _default(field)
            for name, field in backward[kind].model_fields.items()
            if _default(field) != _default(model.model_fields[name])
        }
        gradients = [f"Backward, `{name}` is by default {value}." for name, value in others.items()]
        yield "\n".join(
            [_section(model, f"boundary.forward and .backward, {kind}"), *gradients, ""]
        )
    for name, field in boundary.model_fields.items():
        for model in () if name in DIRECTIONS else _models(field.annotation):
            yield _section(model, f"boundary.{name}")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Model classes in an annotation, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _models(part)


def _kind(model: type[BaseModel]) -> str:
    kind = model.model_fields.get("kind")
    return model.__name__ if kind is None else f'kind = "{kind.default}"'


def _section(model: type[BaseModel], head: str) -> str:
    words = "\n\n".join(_words(part) for part in (model, *_shared(model)))
    also = _ALSO.get(model, {})
    rows = [
        f"| `{name}` | {_type(field)}{also.get(name, '')} | {_default(field)} | {_limits(field)} |"
        for name, field in model.model_fields.items()
        if not field.exclude and name != "kind" and not _is_of_all_methods(model, name)
    ]
    rows += filter(None, [_READ_AWAY.get(model)])
    table = "| key | type | default | limits |\n|---|---|---|---|\n" + "\n".join(rows)
    return f"## {head}\n\n{words}\n\n{table if rows else 'It has no settings.'}\n"


def _is_of_all_methods(model: type[BaseModel], name: str) -> bool:
    inherits = issubclass(model, ExchangeOptions) and model is not ExchangeOptions
    return inherits and name in ExchangeOptions.model_fields


def _words(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().replace("\n    ", "\n")


def _shared(model: type[BaseModel]) -> list[type[BaseModel]]:
    """What it has keys in common with others from; no kind of its own."""
    return [
        base
        for base in model.__mro__[1:]
        if issubclass(base, BaseModel) and base is not ExchangeOptions
        if base.model_fields and "kind" not in base.model_fields
    ]


def _type(field: FieldInfo) -> str:
    return _name(field.annotation).replace("|", "\\|")


def _name(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "none"
    if annotation is Ellipsis:
        return "..."
    if origin is typing.Annotated:
        return _name(parts[0])
    if origin is typing.Literal:
        return " | ".join(f"`{part!r}`".replace("'", '"') for part in parts)
    if origin in (typing.Union, UnionType):
        return " | ".join(dict.fromkeys(_name(part) for part in parts))
    if origin is not None:
        inner = ", ".join(_name(part) for part in parts if part is not Ellipsis)
        return f"{origin.__name__} of {inner}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table, {_kind(annotation)}" if "kind" in annotation.model_fields else "table"
    return str(getattr(annotation, "__name__", annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return (
            "the table's defaults" if "kind" not in type(value).model_fields else _kind(type(value))
        )
    if value is None:
        return "none"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _limits(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    words |= {"min_length": "length at least", "pattern": "matches"}
    found = [
        f"{word} `{getattr(limit, name)}`"
        for limit in field.metadata
        for name, word in words.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join(found).replace("|", "\\|")

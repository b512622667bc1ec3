"""`thinpipe init`: writes a run file that starts as it stands."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.launch import preflight
from thinpipe.launch.config.cli_options import reject
from thinpipe.launch.config.run import load_config
from thinpipe.launch.config.toml import ConfigError, toml_value
from thinpipe.launch.host.resources import usable_cores
from thinpipe.launch.starter.draft import Draft, look

_COMMENTS = {
    "pretrained": "folder of a Hugging Face model, whose weights training starts from",
    "config": "only its config.json is read: the weights are random",
    "factory": "module:function, of this folder or installed",
    "loss": "returns the sum and the number of losses",
    "count": "how many losses these targets have",
    "layers": "more, wider layers learn more and take longer",
    "context": "context length in tokens",
    "path": "a file, a folder or a glob",
    "train_sequences": 'number of sequences, or "all"',
    "eval_sequences": "held out, to see how well it learns",
    "sequence_length": "in tokens; without a tokenizer a token is a byte",
    "tokenizer": 'a folder, "model" for the model\'s; by default bytes',
    "text_field": "of each row",
    "messages_field": "the conversation of each row",
    "chat_template": '"tokenizer": its own; "plain": headings; or a file of Jinja',
    "loss_on": '"assistant": every answer; "last": the last one; "all": every token',
    "batch_size": "samples per step, over all stages and replicas",
    "lr": "the highest learning rate; it warms up, then decays",
    "cuts": "first layer of each stage after stage 0",
    "samples": "texts that the model writes at the end",
    "stages": "each is a process; they are cut where a measurement says",
}
_BOUNDARY = """\
[[boundary]]                # what crosses the cuts; `thinpipe plan` recommends bits for a link
forward = { kind = "aqsgd", bits = 4 }     # how a sample's activations changed since last time
backward = { kind = "direct", bits = 8 }   # gradients"""
_BOUNDARY_TRAINED = """\
[[boundary]]                # what crosses the cuts; `thinpipe plan` recommends steps for a link
forward = { kind = "transform" }           # how a sample's activations changed since last time
backward = { kind = "transform" }          # and its gradients; both take memory at both ends"""
_MOST_STAGES = 4  # or as many as there are cores: on one machine others only take turns


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
        reject(error)
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


def render(found: Draft, name: str, file: str) -> str:
    """A run file for what was found; `name` is the run's, `file` its own."""
    head = [
        f"# thinpipe train {file}            # on this machine, all stages",
        f"# thinpipe train {file} --dry-run  # what it needs of memory",
        f"# thinpipe plan {file} --rate 100mbit --delay 20ms",
        *(f"# {note}" for note in found.notes),
        "# All settings: docs/generated/settings.md of ThinPipe's repository",
    ]
    sections = found.sections()
    parts = ["\n".join(head), _table("run", {"name": name, "seed": 0})]
    parts += [_table("model", sections["model"]), _table("data", sections["data"])]
    if sections["pipeline"]:
        parts.append(_table("pipeline", {**sections["pipeline"], "microbatches": 4}))
        parts.append(_BOUNDARY_TRAINED if "pretrained" in found.model else _BOUNDARY)
    parts.append(_table("train", sections["train"]))
    if "eval" in sections:
        parts.append(_table("eval", sections["eval"]))
    return "\n\n".join(parts) + "\n"


def _table(name: str, values: dict[str, Any]) -> str:
    lines = [f"[{name}]"]
    for key, value in values.items():
        line = f"{key} = {toml_value(value)}"
        comment = _COMMENTS.get(key)
        lines.append(f"{line:27} # {comment}" if comment else line)
    return "\n".join(lines)

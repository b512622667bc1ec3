"""The text of a run file, with a comment wherever one would ask."""

from typing import Any

from thinpipe.launch.config.toml import toml_value
from thinpipe.launch.starter.draft import Draft

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

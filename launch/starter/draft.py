"""Settings that `thinpipe init` finds by itself: the kind of model, of data, and where to cut."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pydantic import ValidationError

from thinpipe.launch.config.errors import explain
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.corpus import check_data
from thinpipe.launch.data.chat.template import OWN, PLAIN
from thinpipe.launch.data.documents import Document
from thinpipe.launch.data.encode import encoder_for
from thinpipe.launch.data.reading.source import first_rows
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.tokenizer import load_tokenizer
from thinpipe.launch.data.tokenizer_files import has_chat_template, has_tokenizer
from thinpipe.launch.host.packages import require
from thinpipe.pipeline.models.own.functions import load_function
from thinpipe.pipeline.models.paths import user_path

_TEXT = ("text", "content", "document")
_CHAT = ("messages", "conversations", "conversation")
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("input", "output"),
)
_SEPARATED = "prompt"
"""By custom it ends in a separator; other questions need a template that sets off the answer."""
_LENGTHS = (128, 64, 32, 16, 8)  # of sequences, the first for which there is enough text
_NEARLY, _MOST_CONTEXT = 0.95, 1024
"""Share of conversations that fit; the longest context of a new model."""
_BATCH = 16  # or all samples, if there are fewer


@dataclass
class Draft:
    """Sections of a run file, by name; the notes are comments of it."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    cuts: Sequence[int] | None = None
    """None where they are measured."""
    stages: int = 1
    notes: list[str] = field(default_factory=list)

    def sections(self) -> dict[str, Any]:
        cuts = {"cuts": "auto", "stages": self.stages} if self.cuts is None else {"cuts": self.cuts}
        pipeline = cuts if self.stages > 1 else {}
        found = {"model": self.model, "data": self.data, "pipeline": pipeline, "train": self.train}
        return found | ({"eval": {"samples": 3}} if "layers" in self.model else {})


def look(model: str | None, data: str | None, stages: int) -> Draft:
    """Find out what there is; `model` is a folder or "module:function", `data` a path or one."""
    own = is_function(model)
    if own != is_function(data):
        raise ConfigError(
            f"--model = {model}, --data = {data}: a model of your own takes samples of your own, "
            "and no other does; give both as module:function"
        )
    found = Draft(train={"epochs": 3, "batch_size": _BATCH, "lr": 1e-3})
    if model is not None and data is not None and own:
        _look_at_functions(found, model, data)
    else:
        _look_at_model(found, model)
        _look_at_data(found, data)
    _fit(found, stages)
    return found


def is_function(text: str | None) -> bool:
    """Whether it has the form of "module:function"."""
    module, colon, function = (text or "").partition(":")
    return bool(colon) and module.replace(".", "").isidentifier() and function.isidentifier()


def _look_at_functions(found: Draft, model: str, data: str) -> None:
    found.model = {"factory": model}
    module = model.partition(":")[0]
    load_function(model, "--model")  # imports it
    for name in ("loss", "count"):
        if callable(getattr(sys.modules[module], name, None)):
            found.model[name] = f"{module}:{name}"
    if "loss" not in found.model:
        found.notes.append(f"{module} has no function loss: next-token cross entropy is used")
    found.data = {"factory": data}


def _look_at_model(found: Draft, model: str | None) -> None:
    if model is None:
        found.model = {"layers": 8, "width": 128, "heads": 4, "context": 128}
        return
    folder = user_path(model)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model = {model}: neither a folder with config.json nor module:function; correct "
            "it, or run `hf download NAME --local-dir FOLDER` first and name that folder"
        )
    require("transformers")
    if any(folder.glob("*.safetensors")):
        found.model = {"pretrained": model}
        found.train |= {"lr": 5e-5}
    else:
        found.model = {"config": model}
        found.notes.append(f"{model} has no weights (*.safetensors): random ones are trained")
    if has_tokenizer(folder):
        found.data["tokenizer"] = "model"
    else:
        found.notes.append(
            f"{model} has no tokenizer (tokenizer.json): text is cut into bytes, which a "
            "pretrained model has not seen"
        )


def _look_at_data(found: Draft, data: str | None) -> None:
    if data is None:
        found.notes.append("no --data: the text is the source code of Python's standard library")
        found.data |= {"train_sequences": 512}
        return
    found.data |= {"path": data, "train_sequences": "all"}
    rows = first_rows(data, "--data")
    if rows is None:
        return
    if not rows:
        raise ConfigError(f"--data = {data!r}: no rows; name a file that has some")
    folder = found.model.get("pretrained", found.model.get("config"))
    own = folder is not None and has_chat_template(user_path(folder))
    readable = next((row for row in rows if row.problem is None), None)
    if readable is None:
        raise ConfigError(f"--data = {data!r}: {rows[0].where}: {rows[0].problem}; correct it")
    found.data |= find_fields(readable, data, has_template=own)


def _fit(found: Draft, stages: int) -> None:
    small = {"batch_size": 1}
    if "factory" in found.data:
        config = _config(found, data={"eval_sequences": 1}, train=small)
        count = len(check_data(config).train) + 1
        found.data["eval_sequences"] = held_out = max(1, min(64, count // 10))
        samples = count - held_out
    else:
        found.data["sequence_length"], samples = _longest(found)
        config = _config(found, train=small)
    found.train["batch_size"] = min(_BATCH, samples)
    found.stages = min(stages, config.model.layers)
    if "factory" not in found.data:
        layers = config.model.layers
        found.cuts = [round(layers * cut / found.stages) for cut in range(1, found.stages)]


def _longest(found: Draft) -> tuple[int, int]:
    """The longest sequences for which there is text, and how many there are."""
    model: Any = _config(found, data={"sequence_length": 1}).model  # of tokens, not a custom one
    wanted = [length for length in _LENGTHS if length <= model.context] or [model.context]
    if "layers" in found.model:
        found.model["context"] = max([model.context, *_needed(found, _MOST_CONTEXT)])
        wanted = [found.model["context"], *wanted]
    else:
        wanted = _needed(found, model.context) + wanted
    for length, held_out in product(wanted, (64, 8, 1)):
        sizes = {"sequence_length": length, "eval_sequences": held_out}
        try:
            corpus = check_data(_config(found, data=sizes, train={"batch_size": 1}))
        except ValueError as error:
            last = error
            continue
        found.data["eval_sequences"] = held_out
        return length, len(corpus.train)
    raise last


def _needed(found: Draft, context: int) -> list[int]:
    """The length that nearly all of the first conversations or prompts need, if data are some."""
    own = {"context": context} if "layers" in found.model else {}
    config = _config(found, model=own, data={"sequence_length": context}).data
    if config.kind != "instructions" or config.path is None:
        return []
    encoder = encoder_for(config, load_tokenizer(config.tokenizer))
    found_there = map(encoder.encode, first_rows(config.path, "--data") or [])
    sizes = sorted(len(one) for one in found_there if isinstance(one, Document))
    if not sizes:
        return []
    needed = sizes[int(_NEARLY * (len(sizes) - 1))] - 1  # the last token is no input
    return [min(context, max(_LENGTHS[0], 1 << (needed - 1).bit_length()))]


def _config(found: Draft, **changes: dict[str, Any]) -> RunConfig:
    """The config without cuts, for a look at model and data."""
    sections = found.sections() | {"pipeline": {}}
    changed = {name: {**sections[name], **more} for name, more in changes.items()}
    try:
        return RunConfig.model_validate(sections | changed)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, RunConfig))) from error


def find_fields(row: Row, data: str, *, has_template: bool) -> dict[str, Any]:
    """Settings of [data] for rows like this one; `has_template` is the tokenizer's."""
    names = list(row.fields)
    template = {"chat_template": OWN if has_template else PLAIN}
    for name in _CHAT:
        if name in names and _is_chat(row.fields[name]):
            return {"messages_field": name, "loss_on": "assistant", **_checked(template)}
    for prompt, response in _PAIRS:
        if prompt not in names or response not in names:
            continue
        first = [prompt, "input"] if prompt == "instruction" and "input" in names else prompt
        found: dict[str, Any] = {"prompt_field": first, "response_field": response}
        if has_template or prompt != _SEPARATED or _is_chat(row.fields[prompt]):
            found |= _checked(template)
        return found
    for name in _TEXT:
        if name in names:
            return {"text_field": name}
    known = ", ".join((*_TEXT, *_CHAT))
    raise ConfigError(
        f"--data = {data!r}: it has the fields {', '.join(map(str, names))}, none of which is "
        f"known as text or messages ({known}) or as prompt and response; rename them, or begin "
        "with a run file of examples/ and name them in [data]"
    )


def _is_chat(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    first = value[0]
    return isinstance(first, Mapping) and ({"role", "content"} <= first.keys() or "from" in first)


def _checked(template: dict[str, Any]) -> dict[str, Any]:
    require("transformers")  # which renders templates
    return template

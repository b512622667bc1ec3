"""Reports pydantic's validation errors in terms of the file: key, value, remedy."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

_Models = Mapping[str, type[BaseModel]]
"""Models of a table, by the tag that pydantic adds to the location of an error in a union."""

_REMEDIES = {
    "greater_than": "use a number greater than {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than": "use a number less than {lt}",
    "less_than_equal": "use {le} or less",
    "finite_number": "give a finite number",
    "string_type": "give text, in quotes",
    "string_too_short": "give some text, or leave it out",
    "literal_error": "use {expected}",
    "union_tag_invalid": "use {expected_tags}",
    "tuple_type": "write a list, as in [{given}]",
    "string_pattern_mismatch": "use letters, digits, -, _ and ., at most 63",
    "too_short": "give at least {min_length}",
    "too_long": "give at most {max_length}",
    "byte_size": 'write a size, as in "8GB" or "512MiB"',
    "byte_size_unit": 'write a size, as in "8GB" or "512MiB"',
}
_OTHERS = {
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), "lr"),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim"), "width"),
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers", "depth"), "layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_attention_heads"), "heads"),
    **dict.fromkeys(("vocab_size",), "vocab"),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "block_size", "seq_len"), "context"),
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), "clip_norm"),
    **dict.fromkeys(("wd",), "weight_decay"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "decay"),
    **dict.fromkeys(("dp", "data_parallel", "dp_degree"), "replicas"),
    **dict.fromkeys(("pp", "pp_degree", "num_stages"), "stages"),
    **dict.fromkeys(("micro_batches", "num_microbatches"), "microbatches"),
    **dict.fromkeys(("dtype", "mixed_precision", "bf16", "fp16"), "precision"),
    **dict.fromkeys(("r", "lora_r"), "rank"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), "weights"),
    **dict.fromkeys(("quantization_config", "torch_dtype"), "weights"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer"), "offload"),
}
"""Settings of other programs, and ours."""
_KINDS = {
    "folder": "a Hugging Face model (pretrained or config)",
    "own": "a model of your own (factory)",
    "shape": "ThinPipe's own model, without pretrained, config or factory",
}
"""Names of kinds of [model]; tables elsewhere have a `kind`."""
_TYPE_REMEDIES = {
    "int": "give a whole number",
    "float": "give a number",
    "bool": "use true or false",
}
_VERY_NEAR = 0.75
"""Likeness of an unknown key to one of its table that counts more than the same key elsewhere."""
_UNKNOWN = ": unknown key; "
_TABLES = ("model_type", "model_attributes_type", "dict_type")
"""Errors about a value where a table belongs."""
_LENGTHS = ("tuple_type", "too_long", "missing")  # errors about a list that has a fixed length


def explain(error: ValidationError, root: type[BaseModel], *above: str) -> list[str]:
    """One line per wrong key of the table that `root` models; `above` is the path of that table."""
    found: dict[str, list[_Problem]] = {}
    for detail in error.errors():
        problem = _explain(detail, _find(detail, root, above), root)
        found.setdefault(problem.name, []).append(problem)
    return _alike_in_one(
        _join(problems)
        for name, problems in found.items()
        if not any(other.startswith(f"{name}.") for other in found)  # the most specific of a union
    )


def _alike_in_one(lines: Iterable[str]) -> list[str]:
    """The lines, with one for all unknown keys that have the same remedy."""
    by_remedy: dict[str, list[str]] = {}
    for line in lines:
        name, unknown, remedy = line.partition(_UNKNOWN)
        by_remedy.setdefault(remedy if unknown else "", []).append(name)
    told = by_remedy.pop("", [])
    for remedy, names in by_remedy.items():
        line = f"{', '.join(names)}{_UNKNOWN}{remedy}"
        if len(names) > 1:
            line = line.replace("key; it is", "keys; they are").replace("remove it", "remove them")
        told.append(line)
    return told


def first_misread(given: Any, found: Any, *above: str) -> str | None:
    """The first `true`, `false` or quoted number that was taken for a number, as "a.b = true".

    `given` is what was read, `found` what was made of it: pydantic takes true for 1 and "8" for 8.
    """
    if isinstance(given, bool | str):
        number = isinstance(found, int | float) and not isinstance(found, bool)
        misread = number and (isinstance(given, bool) or _reads_as_number(given))
        return f"{'.'.join(above)} = {json.dumps(given)}" if misread else None
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(given, Mapping):
        of = found.get if isinstance(found, Mapping) else partial(getattr, found)
        pairs = ((key, value, of(key, None)) for key, value in given.items())
    elif isinstance(given, list) and isinstance(found, list | tuple):
        pairs = ((index, *pair) for index, pair in enumerate(zip(given, found, strict=False)))
    inside = (first_misread(value, its, *above, str(key)) for key, value, its in pairs)
    return next(filter(None, inside), None)


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Problem(NamedTuple):
    """An error at a key, with its value if that helps, and the remedy.

    `sure`: it applies whichever member of a union was meant.
    """

    name: str
    what: str
    remedy: str
    sure: bool = False


def _join(problems: Sequence[_Problem]) -> str:
    chosen = [problem for problem in problems if problem.sure] or problems
    remedies = dict.fromkeys(problem.remedy for problem in chosen)
    return f"{chosen[0].what}{', or '.join(remedies)}"


@dataclass(frozen=True)
class _Place:
    """A wrong key as written, with what the table that holds it and its own table may be.

    pydantic adds names of its own to a location, such as the kind of a boundary.
    """

    name: str
    holder: _Models
    here: _Models
    many: bool = False
    others: _Models = field(default_factory=dict)
    """Other models of the own table."""
    default: Any = None

    @property
    def above(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]


def _find(detail: ErrorDetails, root: type[BaseModel], path: Sequence[str]) -> _Place:
    here: _Models = {"": root}
    holder, kept, many, keys_are_free = here, list(path), False, False
    others: _Models = {}
    default: Any = None
    for part in detail["loc"]:
        (model,) = here.values() if len(here) == 1 else (None,)
        if isinstance(part, int):
            kept.append(str(part))
            many = False
        elif model is not None and part in model.model_fields:
            found = model.model_fields[part]
            annotation, default = found.annotation, None if found.is_required() else found.default
            holder, here, others = here, _models(annotation), {}
            many, keys_are_free = get_origin(annotation) is tuple, get_origin(annotation) is dict
            kept.append(part)
        elif part in here:
            others, here = here, {part: here[part]}
        elif keys_are_free and part != "[key]":
            kept.append(part)
    if detail["type"] == "extra_forbidden":
        holder = here
        kept += [str(detail["loc"][-1])]
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], int):
        del kept[-1]  # what is wrong is the list
    return _Place(".".join(kept), holder, here, many, others, default)


def _explain(detail: ErrorDetails, place: _Place, root: type[BaseModel]) -> _Problem:
    kind, name = detail["type"], place.name
    if kind == "extra_forbidden":
        return _Problem(name, f"{name}{_UNKNOWN}", _known(place, root))
    if kind == "missing" and not isinstance(detail["loc"][-1], int):
        what = f"write at least one table [[{name}]]" if place.many else "it has no default"
        return _Problem(name, f"{name}: not given; ", what)
    if kind == "union_tag_not_found":
        kinds = ", ".join(sorted(place.here))
        return _Problem(name, f"{name}.kind: not given; ", f"use one of {kinds}")
    if kind == "value_error":
        message = remedy(detail)
        return _Problem(name, _path_of(message, place), message, sure=True)
    value = detail["ctx"]["tag"] if kind == "union_tag_invalid" else detail["input"]
    key = f"{name}.kind" if kind == "union_tag_invalid" else name
    return _Problem(name, f"{key} = {value!r}: ", _remedy(detail, place) + _nearest(value, detail))


def _path_of(message: str, place: _Place) -> str:
    """Prefix for a validator's message, which may begin with "key = value"."""
    key = re.match(r"([\w.]+) = ", message)
    if key is None or not place.name:
        return f"{place.name}: " if place.name else ""
    same = place.key == key[1].partition(".")[0]
    return place.name.removesuffix(place.key) if same else f"{place.name}."


def _remedy(detail: ErrorDetails, place: _Place) -> str:
    kind = detail["type"]
    if place.many and place.here and kind in ("tuple_type", "model_type", "too_short"):
        return f"write it as tables [[{place.name}]]"
    if kind in _TABLES:
        unset = "leave it out, or " if detail["input"] is False else ""
        return f"{unset}write it as {_as_table(place)}"
    if kind in _LENGTHS and place.default:
        return f"give {len(place.default)} values, as in {list(place.default)}"
    return remedy(detail)


def _as_table(place: _Place) -> str:
    """How the table begins that belongs at a place."""
    if place.key.isdigit():
        return f"a table [[{place.above}]]"
    model = next(iter(place.here.values()), None)
    if model is None:
        settings = dict(place.default or {"NAME": "..."})
    else:
        settings = {name: field.default for name, field in model.model_fields.items()}
    valued = [name for name, value in settings.items() if value is not None] or [*settings]
    name = "kind" if "kind" in settings else valued[0]
    setting = f"{name} = {json.dumps(settings[name])}"
    if not place.above:
        return f"a section [{place.name}], as in {setting}"
    return f"a table, as in {place.key} = {{ {setting} }}"


def remedy(detail: ErrorDetails) -> str:
    """The remedy for a wrong value of any setting."""
    kind = detail["type"]
    text = _REMEDIES.get(kind) or _TYPE_REMEDIES.get(kind.split("_")[0])
    if text is None:
        return detail["msg"].removeprefix("Value error, ")
    ctx = detail.get("ctx", {})
    whole = {k: int(v) for k, v in ctx.items() if isinstance(v, float) and v.is_integer()}
    return text.format(**{"given": json.dumps(detail["input"], default=str)} | ctx | whole)


def _known(place: _Place, root: type[BaseModel]) -> str:
    known = [key for model in place.holder.values() for key in written_keys(model)]
    section, _, key = place.name.rpartition(".")
    elsewhere: dict[str, list[str]] = {}
    if "." not in section:
        for name, field in root.model_fields.items():
            keys = {k for model in _models(field.annotation).values() for k in written_keys(model)}
            for other in keys if name != section else ():
                elsewhere.setdefault(other, []).append(f"[{name}]")
    own_word = _OTHERS.get(key.lower().replace("-", "_"))
    if own_word in known:
        return f'did you mean "{own_word}"?'
    if kinds := [
        _KINDS.get(tag, f'kind = "{tag}"')
        for tag, m in place.others.items()
        if key in written_keys(m)
    ]:
        return f"it is for {' or '.join(kinds)}; remove it"
    if key in elsewhere and not difflib.get_close_matches(key, known, n=1, cutoff=_VERY_NEAR):
        return f"it belongs under {' or '.join(elsewhere[key])}"
    if own_word in elsewhere:
        return f'did you mean "{own_word}" under {" or ".join(elsewhere[own_word])}?'
    near = difflib.get_close_matches(key, [*known, *elsewhere], n=1) if not section else []
    if near and near[0] not in known:
        return f'did you mean "{near[0]}" under {" or ".join(elsewhere[near[0]])}?'
    return known_keys(key, known)


def known_keys(key: str, known: Iterable[str]) -> str:
    """The key that was meant by an unknown one, or all that are known, the likeliest first."""
    by_lower = {word.lower(): word for word in known}
    if not by_lower:
        return "there are no settings here; remove it"
    near = difflib.get_close_matches(key.lower(), by_lower, n=1)
    if near:
        return f'did you mean "{by_lower[near[0]]}"?'
    return f"known here: {', '.join(_by_likeness(key, known))}"


def _by_likeness(word: str, known: Iterable[str]) -> list[str]:
    likeness = difflib.SequenceMatcher(b=word)

    def unlike(other: str) -> tuple[float, str]:
        likeness.set_seq1(other)
        return -likeness.ratio(), other

    return sorted(set(known), key=unlike)


def written_keys(model: type[BaseModel]) -> list[str]:
    """The keys that a table of this model may have in a file."""
    fields = [name for name, field in model.model_fields.items() if not field.exclude]
    return [*fields, *getattr(model, "READ_AWAY", ())]


def _nearest(value: Any, detail: ErrorDetails) -> str:
    ctx = detail.get("ctx", {})
    allowed = re.findall(r"'([^']+)'", f"{ctx.get('expected', '')}{ctx.get('expected_tags', '')}")
    by_lower = {word.lower(): word for word in allowed}
    near = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.7)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def _models(annotation: Any) -> _Models:
    """All models in an annotation: by their tag, the kind that is their default, or their name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("kind")
        return {str(kind.default) if kind else annotation.__name__: annotation}
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        for tag in (part.tag for part in parts if isinstance(part, Tag)):
            return {tag: parts[0]}
    return {tag: model for part in parts for tag, model in _models(part).items()}

"""Settings that are gone: what a run file that has one is answered.

A saved run lists every setting. So one that says what always holds now is passed over.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

_GONE: tuple[tuple[str, Any, str], ...] = (
    ("boundary.*.*ward.scale_dtype", "bf16", "scales are bf16, remove it"),
    (
        "boundary.*.*ward*.coding",
        "none",
        'remove it; fewer bits or kind = "transform" make messages shorter',
    ),
    (
        "boundary.*.forward.rate",
        None,
        'use kind = "transform" for a pretrained model, else kind = "aqsgd" with bits = 2',
    ),
    (
        "boundary.*.backward.rate",
        None,
        'use kind = "transform" for a pretrained model, else kind = "stateless" with bits = 4',
    ),
    ("boundary.*.*ward*.tile", 64, "tiles have 64 values, remove it"),
    ("boundary.*.*ward.of", "change", "steps are multiples of the change, remove it"),
    ("boundary.*.*ward.error", None, "set step instead"),
    ("boundary.*.guard.error", 0.6, "remove it"),
    ("boundary.*.guard.rise", 1.5, "remove it"),
    ("boundary.*.guard.patience", 20, "remove it"),
    ("gradcomp.*.group", 128, "128 values share a scale, remove it"),
    ("gradcomp.*.seed", 0, "remove it"),
    ("gradcomp.*.budget", "fixed", "set subset and bits"),
    ("gradcomp.*.local_steps", 1, 'use method = "diloco" or "sparse_loco", which have interval'),
    ("gradcomp.decentralized.format", "fp32", "remove it"),
    ("gradcomp.demo.look_ahead", False, "remove it"),
    ("gradcomp.ef_updates", None, "the method is gone, remove the table"),
    ("gradcomp.quantize", None, "the method is gone, remove the table"),
    ("gradcomp.sparse_loco.divide", "replicas", "remove it"),
    ("model.pooling", "mean", "labels come from the mean over tokens, remove it"),
    ("data.dataset", None, 'set path = "hf:OWNER/NAME:CONFIG" instead'),
    (
        "train.verify_share",
        0.008,
        "the activation cache is no longer verified between steps, remove it",
    ),
)
"""Dotted names, the value that always holds now, and what to do with another."""
_GONE_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("gradcomp.method", "ef_updates", 'use "ef_gradients", or "cocktail" for local updates'),
    ("gradcomp.method", "quantize", 'use "ef_gradients" with fraction = 1 and as many bits'),
    (
        "boundary.*.forward.kind",
        "auto",
        'use kind = "aqsgd" with first_visit = { kind = "stateless", bits = 5 }, or '
        'kind = "stateless" for a single epoch',
    ),
    ("boundary.*.guard.mode", "act", 'use "warn", and more bits when it warns'),
    ("memory.tier", "pinned", 'use "ram", which is as fast'),
    ("memory.tier", "device", 'use "ram", which is as fast'),
    ("boundary.*.*ward.scale_per", "channel", 'use "token", or how many values share a scale'),
    ("boundary.*.*ward.scale_per", "tensor", 'use "token", or how many values share a scale'),
)
"""Values of settings that stay."""


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What was read of a run file, without settings that say what holds anyway.

    Raises:
        ValueError: some say something else; the message has each, and its remedy.
    """
    problems: list[str] = []
    found = dict(_kept(tree, "", problems))
    if problems:
        raise ValueError("\n".join(problems))
    return found


def renewed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a saved run, with removed values as today's that do the same."""
    found = dict(saved)
    if "boundary" in found:
        found["boundary"] = _specs_changed(found["boundary"], _uncoded)
    memory = found.get("memory", {})
    if memory.get("tier") in ("pinned", "device"):  # rows lie elsewhere, and are the same
        found["memory"] = {**memory, "tier": "ram"}
    return found


def of_weights(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a run whose weights alone are of interest: what was sent is past."""
    found = renewed(saved)
    if "boundary" in found:
        found["boundary"] = _specs_changed(
            found["boundary"], lambda spec: {key: spec[key] for key in spec if key != "rate"}
        )
    exchange = found.get("gradcomp", {})
    gone = exchange.get("method") in ("ef_updates", "quantize")
    if gone or exchange.get("demo", {}).get("look_ahead"):
        del found["gradcomp"]
    return found


def _specs_changed(
    tables: Sequence[Mapping[str, Any]], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {key: change(each) if isinstance(each, Mapping) else each for key, each in table.items()}
        for table in tables
    ]


def _uncoded(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A direction without its coding, which was lossless; "rans" was for uniform codes alone."""
    found = {key: value for key, value in spec.items() if key != "coding"}
    if spec.get("coding") == "rans" and spec.get("kind") == "aqsgd":
        found["delta"] = spec.get("delta") or "uniform"
    return found


def _kept(tree: Mapping[str, Any], above: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{above}{key}"
        problems += (
            f"{name} = {json.dumps(value)}: no longer offered; {remedy}"
            for pattern, old, remedy in _GONE_VALUES
            if value == old and fnmatchcase(name, pattern)
        )
        gone = _gone(name)
        if gone is None:
            yield key, _inside(value, f"{name}.", problems)
        elif value != gone[1]:
            problems.append(f"{name} = {json.dumps(value)}: no longer a setting; {gone[2]}")


@functools.cache
def _gone(name: str) -> tuple[str, Any, str] | None:
    """Asked of each setting of a saved run, which lists all of them."""
    return next((each for each in _GONE if fnmatchcase(name, each[0])), None)


def _inside(value: Any, above: str, problems: list[str]) -> Any:
    if isinstance(value, Mapping):
        return dict(_kept(value, above, problems))
    if isinstance(value, list | tuple):
        return [_inside(each, f"{above}{index}.", problems) for index, each in enumerate(value)]
    return value

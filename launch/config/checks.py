"""Rules between sections, one function each.

Every rule raises a ValueError that names setting, value and remedy.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from thinpipe.gradcomp.registry import goes_on, load_method, method_names, parse_options
from thinpipe.launch.config.boundary import BoundaryConfig
from thinpipe.launch.config.errors import explain, first_misread, known_keys, written_keys
from thinpipe.pipeline.config import PipelineConfig


def check_cuts(pipeline: PipelineConfig, layers: int) -> None:
    """Cuts lie between layers, in ascending order."""
    cuts = pipeline.cuts
    if pipeline.auto_cuts and pipeline.stages > layers:
        raise ValueError(
            f"pipeline.stages = {pipeline.stages}: the model has {layers} layers, and every stage "
            f"needs one; use at most {layers}, or raise model.layers"
        )
    if len(cuts) + 1 > layers:
        raise ValueError(
            f"pipeline.cuts = {list(cuts)}: {len(cuts) + 1} stages for {layers} layers; "
            "every stage needs a layer: use fewer cuts or raise model.layers"
        )
    for cut in cuts:
        if not 0 < cut < layers:
            raise ValueError(
                f"pipeline.cuts = {list(cuts)}: {cut} is not between two of the {layers} "
                f"layers; use values from 1 to {layers - 1}"
            )
    if sorted(set(cuts)) != list(cuts):
        raise ValueError(
            f"pipeline.cuts = {list(cuts)}: not in ascending order; write {sorted(set(cuts))}"
        )


def check_boundaries(boundaries: Sequence[BoundaryConfig], pipeline: PipelineConfig) -> None:
    """Every table is of a cut there is."""
    named, cuts = [boundary.cut for boundary in boundaries], pipeline.cuts
    for cut in named:
        if cut is not None and pipeline.auto_cuts:
            raise ValueError(
                f'boundary.cut = {cut}: with pipeline.cuts = "auto" cuts are not known yet; remove '
                "cut, or list the cuts"
            )
        if cut is not None and cut not in cuts:
            known = f"pipeline.cuts = {list(cuts)}" if cuts else "the pipeline has none"
            raise ValueError(f"boundary.cut = {cut}: no such cut; {known}")
        if named.count(cut) > 1:
            which = "without a cut" if cut is None else f"for cut {cut}"
            raise ValueError(f"boundary: two tables {which}; merge them")


def check_elastic(
    least: int | None,
    pipeline: PipelineConfig,
    method: str,
    options: BaseModel,
    others: Sequence[str],
) -> None:
    """Replicas can go on without one; `others` are settings with which they cannot."""
    if least is None:
        return
    what = f"elastic.min_replicas = {least}"
    if least > pipeline.replicas:
        raise ValueError(
            f"{what}: there are {pipeline.replicas} (pipeline.replicas); use that many or fewer"
        )
    if least == pipeline.replicas:
        return
    if not goes_on(method, options):
        able = [name for name in method_names() if goes_on(name, parse_options(name, {}))]
        delayed = ", not delayed" if method in able else ""
        raise ValueError(
            f'gradcomp.method = "{method}": its replicas cannot go on without one yet ({what}); '
            f"use {', '.join(able)}{delayed}, or remove [elastic]"
        )
    for other in others:
        raise ValueError(
            f"{other}: with it replicas cannot go on without one yet; change it, or remove {what}"
        )


def check_stream(
    block: int | None, epochs: int, max_steps: int | None, remembering: Sequence[tuple[int, str]]
) -> None:
    """A stream has one epoch of known length, and its samples do not come back.

    `remembering` are cuts whose boundary caches samples, and its kind.
    """
    if block is None:
        return
    what = f"data.stream_block = {block}"
    if max_steps is None:
        raise ValueError(f"train.max_steps = none: {what} has no end of its own; set it")
    if epochs != 1:
        raise ValueError(
            f"train.epochs = {epochs}: {what} is read in one pass; set train.epochs = 1"
        )
    for cut, kind in remembering:
        raise ValueError(
            f'boundary.forward.kind = "{kind}" at cut {cut}: it sends what changed since a sample '
            f"was last seen, and with {what} none is seen twice; set forward = "
            '{ kind = "stateless", bits = 5 } and the like backward'
        )


def _belongs(key: str, method: str) -> str:
    """Where a key of [gradcomp] was meant to be: in the table of a method, of the chosen first."""
    having = [name for name in method_names() if key in written_keys(load_method(name).Config)]
    if method in having:
        return f"it belongs under [gradcomp.{method}]"
    if having:
        return f"method = {json.dumps(method)} has none; it is for {', '.join(having)}"
    return known_keys(key, ["method", *method_names()])


def check_gradcomp(table: Mapping[str, Any]) -> None:
    """There are such methods and options."""
    method = str(table.get("method", "allreduce"))
    if method not in method_names():
        problem = f"gradcomp.method = {json.dumps(method)}: no such method"
        raise ValueError(f"{problem}; {known_keys(method, method_names())}")
    for key, value in table.items():
        if key == "method":
            continue
        if key not in method_names():
            raise ValueError(f"gradcomp.{key}: unknown key; {_belongs(key, method)}")
        try:
            options = parse_options(key, value)
        except ValidationError as error:
            lines = explain(error, load_method(key).Config, "gradcomp", key)
            raise ValueError("; ".join(lines)) from None
        if misread := first_misread(value, options, "gradcomp", key):
            raise ValueError(f"{misread}: give a number")

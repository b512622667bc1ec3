"""Rules between sections, one function each.

Every rule raises a ValueError that names setting, value and remedy.
"""

import json
from typing import TYPE_CHECKING

from pydantic import ValidationError

from thinpipe.gradcomp.registry import (
    goes_on,
    goes_on_with,
    load_method,
    method_names,
    parse_options,
)
from thinpipe.launch.config.errors import explain, first_misread, known_keys, written_keys

if TYPE_CHECKING:
    from thinpipe.launch.config.run import RunConfig


def check_cuts(config: "RunConfig") -> None:
    """Cuts lie between layers, in ascending order."""
    pipeline, layers = config.pipeline, config.model.layers
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


def check_boundaries(config: "RunConfig") -> None:
    """Every table is of a cut there is."""
    pipeline = config.pipeline
    named, cuts = [boundary.cut for boundary in config.boundary], pipeline.cuts
    for cut in named:
        if cut is not None and pipeline.auto_cuts:
            raise ValueError(
                f'boundary.cut = {cut}: with pipeline.cuts = "auto" cuts are not known yet; remove '
                "cut, or list the cuts"
            )
        if cut is not None and cut not in cuts:
            known = f"use one of pipeline.cuts = {list(cuts)}" if cuts else "the pipeline has none"
            raise ValueError(f"boundary.cut = {cut}: no such cut; {known}, or remove the table")
        if named.count(cut) > 1:
            which = "without a cut" if cut is None else f"for cut {cut}"
            raise ValueError(f"boundary: two tables {which}; merge them")


def check_sizes(config: "RunConfig") -> None:
    """Samples fit the model, and a step's the replicas and shards."""
    data, pipeline, train = config.data, config.pipeline, config.train
    if data.factory is None:
        config.model.check_tokens(data.sequence_length, data.tokenizer)
    if train.batch_size % pipeline.dp_size:
        factors = {"pipeline.replicas": pipeline.replicas, "pipeline.shards": pipeline.shards}
        told = ", ".join(f"{name} = {value}" for name, value in factors.items() if value > 1)
        raise ValueError(
            f"train.batch_size = {train.batch_size} cannot be divided evenly ({told}); use a "
            f"multiple of {pipeline.dp_size}"
        )


def check_elastic(config: "RunConfig") -> None:
    """Replicas can go on without one."""
    least, pipeline, method = config.elastic.min_replicas, config.pipeline, config.method
    if least is None:
        return
    what = f"elastic.min_replicas = {least}"
    if least > pipeline.replicas:
        raise ValueError(
            f"{what}: there are {pipeline.replicas} (pipeline.replicas); use that many or fewer"
        )
    if least == pipeline.replicas:
        return
    if not goes_on(method, config.method_options):
        able = [name for name in method_names() if goes_on_with(name) is not None]
        options = (goes_on_with(method) or {}).items()
        needed = [f"gradcomp.{method}.{key} = {json.dumps(value)}" for key, value in options]
        remedy = f"set {', '.join(needed)}" if needed else f"use {', '.join(able)}"
        raise ValueError(
            f'gradcomp.method = "{method}": its replicas cannot go on without one yet ({what}); '
            f"{remedy}, or remove [elastic]"
        )
    block, shards = config.data.stream_block, pipeline.shards
    others = [f"data.stream_block = {block}"] if block is not None else []
    others += [f"pipeline.shards = {shards}"] if shards > 1 else []
    if pipeline.stages > 1 and config.model.tie_embeddings == "exact":
        others.append('model.tie_embeddings = "exact"')
    for other in others:
        raise ValueError(
            f"{other}: with it replicas cannot go on without one yet; change it, or remove {what}"
        )


def check_ram_copies(config: "RunConfig") -> None:
    """Another machine can take the place of a stage's."""
    every, pipeline = config.checkpoint.ram_every, config.pipeline
    if every is None:
        return
    what = f"checkpoint.ram_every = {every}"
    if pipeline.replicas > 1:
        raise ValueError(
            f"{what}: of {pipeline.replicas} replicas (pipeline.replicas) others go on without a "
            "lost one; set elastic.min_replicas, and remove it"
        )
    if pipeline.pipeline_ranks == 1:
        raise ValueError(f"{what}: a single rank has no other to keep its copy; remove it")
    block, shards, method = config.data.stream_block, pipeline.shards, config.method
    others = [f"data.stream_block = {block}"] if block is not None else []
    others += [f"pipeline.shards = {shards}"] if shards > 1 else []
    if not goes_on(method, config.method_options):
        others.append(f'gradcomp.method = "{method}"')
    for other in others:
        raise ValueError(
            f"{other}: with it no machine can take the place of another yet; change it, or remove "
            f"{what}"
        )


def check_stream(config: "RunConfig") -> None:
    """A stream has one epoch of known length, and its samples do not come back."""
    train = config.train
    if config.data.stream_block is None:
        return
    what = f"data.stream_block = {config.data.stream_block}"
    if train.max_steps is None:
        raise ValueError(f"train.max_steps = none: {what} has no end of its own; set it")
    if train.epochs != 1:
        raise ValueError(
            f"train.epochs = {train.epochs}: {what} is read in one pass; set train.epochs = 1"
        )
    for (cut, direction), spec in config.specs.items():
        if spec.remembers:
            raise ValueError(
                f'boundary.{direction}.kind = "{spec.kind}" at cut {cut}: it sends what changed '
                f"since a sample was last seen, and with {what} none is seen twice; set forward = "
                '{ kind = "stateless", bits = 5 } and the like backward'
            )


def check_task(config: "RunConfig") -> None:
    """Data and model are of one task."""
    data, model = config.data, config.model
    labelled = data.kind == "labelled"
    if data.factory is None and (model.task == "classification") != labelled:
        raise ValueError(
            f'model.task = "{model.task}", data.label_field = {data.label_field!r}: '
            "classification needs labels and language modelling has none; set both or neither"
        )
    if data.packs or data.objective == "prefix":
        try:
            model.check_masks(data.sequence_length)
        except ValueError as error:
            raise ValueError(
                f"data.packing = {str(data.packs).lower()}, "
                f'data.objective = "{data.objective}": {error}'
            ) from None
    if data.labels is not None and model.problem == "regression":
        raise ValueError(
            f"data.labels = {list(data.labels)}: regression predicts numbers, which have no names; "
            "remove it"
        )
    if data.labels is not None and len(data.labels) != model.classes:
        raise ValueError(
            f"data.labels = {list(data.labels)}: {len(data.labels)} names for model.classes = "
            f"{model.classes}; make the numbers equal"
        )


def check_tie(config: "RunConfig") -> None:
    """Tied copies stay equal only if all replicas apply equal gradients."""
    model, ranks = config.model, config.stage_ranks
    copies = ranks[0] != ranks[config.pipeline.stages - 1] and not model.is_frozen
    if copies and model.tie_embeddings == "exact" and not keeps_ties(config):
        raise ValueError(
            f'model.tie_embeddings = "exact" with gradcomp.method = "{config.method}", which lets '
            'replicas differ: the tied copies would drift; use tie_embeddings = "untied" or a '
            "method that exchanges gradients"
        )


def keeps_ties(config: "RunConfig") -> bool:
    """Whether replicas stay equal."""
    return config.pipeline.replicas == 1 or load_method(config.method).REPLICAS_EQUAL


def _belongs(key: str, method: str) -> str:
    """Where a key of [gradcomp] was meant to be: in the table of a method, of the chosen first."""
    having = [name for name in method_names() if key in written_keys(load_method(name).Config)]
    if method in having:
        return f"it belongs under [gradcomp.{method}]"
    if having:
        return f"method = {json.dumps(method)} has none; it is for {', '.join(having)}"
    return known_keys(key, ["method", *method_names()])


def check_gradcomp(config: "RunConfig") -> None:
    """There are such methods and options."""
    table = config.gradcomp
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

"""Which settings of a resumed run differ from those of its checkpoint, in run file syntax."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from thinpipe.launch.config.boundary import BoundaryConfig, ForwardConfig, boundary_at
from thinpipe.launch.config.removed import renewed, without_removed
from thinpipe.launch.config.toml import toml_value
from thinpipe.pipeline.wire.told import DIRECTIONS

_MAY_CHANGE = (
    *("run.name", "eval.", "checkpoint.", "elastic.", "network.", "train.max_skipped"),
    "train.verify_every",
    *(f"pipeline.{name}" for name in ("cuts", "ranks", "replicas", "schedule", "depth")),
    *(f"pipeline.{name}" for name in ("shards", "microbatches", "device", "offload")),
    *(f"pipeline.{name}" for name in ("deterministic", "devices_per_rank", "peer_timeout_s")),
)
_EPOCHS, _STEPS = "train.epochs", "train.max_steps"
_MOST = 8  # in one message; of the others it says how many


class Change(NamedTuple):
    """A setting in the checkpoint and in this run; None where it is not set.

    `cut` is set for settings of a boundary.
    """

    name: str
    before: Any
    now: Any
    cut: int | None = None


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Settings that must be changed back; both arguments are `RunConfig.shared`."""
    saved, now = (_with_weights(without_removed(renewed(config))) for config in (saved, now))
    may_change = _MAY_CHANGE
    if saved["train"]["decay"] == "none":
        may_change += (_EPOCHS, _STEPS)
    if saved["pipeline"]["shards"] != now["pipeline"]["shards"]:
        may_change += ("shards.ranks_per_site",)  # it divides them
        if saved["model"].get("lora"):  # shards hold frozen weights in fp32
            may_change += ("model.weights",)
    tables = ({**config, "boundary": {}} for config in (saved, now))
    found = [change for change in _changes("", *tables) if not change.name.startswith(may_change)]
    for cut in sorted(set(saved["pipeline"]["cuts"]) & set(now["pipeline"]["cuts"])):
        changes = _boundary_changes(*(_boundary(config, cut) for config in (saved, now)))
        found += [change._replace(cut=cut) for change in changes]
    return found


def _with_weights(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Before `model.weights` was a setting, frozen weights were fp32; as where it is not set."""
    if "pretrained" not in config["model"]:
        return config
    return {
        **config,
        "model": {**config["model"], "weights": config["model"].get("weights") or "fp32"},
    }


def describe_changes(changes: Sequence[Change]) -> list[str]:
    """One phrase per setting (boundaries alike at several cuts share one), cut off at a maximum."""
    cuts: dict[tuple[str, str], list[int]] = {}
    for change in changes:
        at_cuts = cuts.setdefault((change.name, _values(change)), [])
        at_cuts += [] if change.cut is None else [change.cut]
    phrases = [f"{_at(at_cuts)}{name}{values}" for (name, values), at_cuts in cuts.items()]
    more = len(phrases) - _MOST
    return phrases if more <= 0 else [*phrases[:_MOST], f"{more} more settings changed"]


def epochs_hint(changes: Sequence[Change]) -> str:
    """When `train.epochs` may differ, if it is among the changes."""
    if all(change.name != _EPOCHS for change in changes):
        return ""
    return (
        ' (train.epochs may change only with train.decay = "none", since the decay depends on it)'
    )


def _changes(name: str, before: Any, now: Any) -> Iterator[Change]:
    if before == now:
        return
    if not isinstance(before, dict) and not isinstance(now, dict):
        yield Change(name, before, now)
        return
    tables = [value if isinstance(value, dict) else {} for value in (before, now)]
    for key in sorted(tables[0].keys() | tables[1].keys()):
        path = f"{name}.{key}" if name else key
        yield from _changes(path, *(table.get(key) for table in tables))


def _boundary(config: Mapping[str, Any], cut: int) -> BoundaryConfig:
    tables = [BoundaryConfig.model_validate(table) for table in config["boundary"]]
    return boundary_at(tables, cut)


def _boundary_changes(before: BoundaryConfig, now: BoundaryConfig) -> Iterator[Change]:
    """Changed settings of a cut; the whole table where the kind differs."""
    for direction in DIRECTIONS:
        specs = [getattr(boundary, direction) for boundary in (before, now)]
        tables = [spec.model_dump(mode="json") for spec in specs]
        if specs[0].kind == specs[1].kind:
            yield from _changes(direction, *tables)
        else:
            yield Change(direction, _short(specs[0]), _short(specs[1]))
    yield from _changes("guard", *(b.guard.model_dump(mode="json") for b in (before, now)))


def _short(spec: ForwardConfig) -> dict[str, Any]:
    given: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    return {"kind": spec.kind, **given}


def _values(change: Change) -> str:
    before, now = (
        None if value is None else toml_value(value) for value in (change.before, change.now)
    )
    if before is None:
        return f" not set, this run has {now}"
    return f" = {before}, " + (f"this run has {now}" if now else "not set in this run")


def _at(cuts: Sequence[int]) -> str:
    if not cuts:
        return ""
    return f"boundary at cut{'s' if len(cuts) > 1 else ''} {', '.join(map(str, cuts))}: "

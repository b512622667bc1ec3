"""Whether a checkpoint is of this run: settings and data that may not change."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinpipe.launch.checkpoint.manifest import MANIFEST, CheckpointError
from thinpipe.launch.config.diff import changed_settings, describe_changes, epochs_hint
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.net.ranks.handshake import differences


def check_facts(
    folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], data: DataConfig
) -> None:
    """Check that data and settings that may not change are those of the checkpoint.

    Raises:
        CheckpointError: naming each that differs.
    """
    try:
        changed = changed_settings(_as_set(saved, now), _as_set(now, now))
    except ValueError as error:
        raise CheckpointError(
            f"{folder} was made with settings that are gone: {error}; start a new run from its "
            f'weights: model.from_run = "{folder.parents[1]}", another run.name, no --resume'
        ) from None
    differing = describe_changes(changed)
    samples = differences(saved.get("data"), now.get("data"), "data")
    if samples and not any(change.name.startswith("data.") for change in changed):
        differing.append(_other_samples(folder, data, [name for name, *_ in samples]))
    if differing:
        is_own = "factory" in now["config"]["model"]
        own = " (in a program, tp.Pipeline(from_run=...))" if is_own else ""
        it = "it" if len(differing) == 1 else "them"
        raise CheckpointError(
            f"{folder} was made with {'; with '.join(differing)}; change {it} back"
            f"{epochs_hint(changed)}, or start a new run from its weights: "
            f'model.from_run = "{folder.parents[1]}"{own} and another run.name, without --resume'
        )


def _as_set(facts: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that a run began with: replicas, and with them the batch, may have changed.

    That it has `now` may be the last one, too.
    """
    config: Mapping[str, Any] = facts["config"]
    wanted = now.get("batch_size", now["config"]["train"]["batch_size"])
    if "batch_size" not in facts or config["train"]["batch_size"] == wanted:
        return config
    return {**config, "train": {**config["train"], "batch_size": facts["batch_size"]}}


def _other_samples(folder: Path, data: DataConfig, sets: Sequence[str]) -> str:
    from thinpipe.launch.data.load import files

    saved_s = (folder / MANIFEST).stat().st_mtime
    late = [str(path) for path in files(data) if path.stat().st_mtime > saved_s]
    found = f"written since then: {', '.join(late[:4])}" if late else "no file is newer"
    more = f" and {len(late) - 4} more" if len(late) > 4 else ""
    return (
        f"other samples ({' and '.join(sets)} differ; {data.source}, data.tokenizer = "
        f"{data.tokenizer!r}: {found}{more}; restore the old content or point to a copy "
        "of it)"
    )

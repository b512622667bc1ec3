"""The events of one training step on all ranks, on a common clock, and their file."""

from pathlib import Path

from pydantic import BaseModel, ValidationError

from thinpipe.pipeline.wire.told import ComputeEvent, ScheduleName, WireTotal

FILE_NAME = "timeline.json"


class Timeline(BaseModel, frozen=True, extra="forbid"):
    """One step: its events, in seconds since the first rank began it, and its traffic.

    `step` counts from 1, `wire` sums over the replicas. `pipeline_ranks` ranks make a replica, or
    with shards a DP rank, in whose order (`pipeline/mesh.py`) events count ranks. A step runs the
    schedule `accumulate` times.
    """

    step: int
    schedule: ScheduleName
    depth: int
    microbatches: int
    accumulate: int
    pipeline_ranks: int
    replicas: int
    cuts: tuple[int, ...]
    wire: tuple[WireTotal, ...]
    events: tuple[ComputeEvent, ...]

    def write(self, folder: Path) -> None:
        (folder / FILE_NAME).write_text(self.model_dump_json(by_alias=True), encoding="utf-8")


def read_timeline(folder: Path) -> Timeline:
    """The timeline of a run.

    Raises:
        ValueError: the run has none, or the file is damaged.
    """
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; give that of a finished run, such as runs/quickstart"
        )
    try:
        return Timeline.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no timeline; it is written at the end of a run, on the first host, for a "
            "step of the second epoch (or the last step of a shorter run)"
        ) from None
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(f"{path}: not a timeline ({key}); run the training again") from None

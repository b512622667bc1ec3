"""Metrics of every training step, and their file: one JSON object per line.

The training loop, the display and the report share these dataclasses.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from thinpipe.launch.host import disk
from thinpipe.launch.host.words import NOTHING, WireKey, format_count
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction, WireTotal

EARLIER_CUT = "earlier cut"
"""The method of cuts from before a resume with other cuts."""

_log = logging.getLogger(__name__)


def _nan_from_null(value: object) -> object:
    return math.nan if value is None else value


Loss: TypeAlias = Annotated[float, BeforeValidator(_nan_from_null)]
"""A float that JSON stores as null when it is not finite, and that is read back as NaN."""


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one training step.

    `step` and `epoch` count from 1. `loss` is the mean over the step's tokens (NaN if it
    overflowed). `tokens` and `tokens_per_s` count the whole step, all replicas together. In a step
    in which replicas do not wait for each other the loss is one replica's, and counts are those of
    one times the replicas. `bubble` is the fraction (0 to 1) of the step in which the stages'
    devices were idle, the mean over ranks. `skipped`: the optimizer step was skipped.
    `sync_bytes` went between replicas,
    `control_bytes` are neither activations nor gradients (losses, flags). `eval` is set
    only after an evaluation: `loss` with uncompressed boundaries and, if measured,
    `loss_compressed` with those of training; likewise other metrics of the objective. In
    classification `tokens` counts samples. `repaired` counts, by cut, samples whose cache entries
    differed or were lost and were reset at both ends; `notes` are messages of the guard. `own`
    holds numbers that the user's program logged. `weight_bytes` and `gradient_bytes` went between
    the shards of stages. `samples` are those that count in the step, over all replicas; of runs of
    earlier versions they are not known.
    """

    step: int
    epoch: int
    loss: Loss
    tokens_per_s: float
    step_s: float
    bubble: float
    wire: tuple[WireTotal, ...]
    tokens: int
    grad_norm: float | None
    lr: float
    skipped: bool
    sync_bytes: int
    control_bytes: int
    eval: Mapping[str, Loss] | None
    repaired: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    own: Mapping[str, Loss] = field(default_factory=dict)
    weight_bytes: int = 0
    gradient_bytes: int = 0
    samples: int | None = None

    @property
    def bytes_per_cut(self) -> dict[int, int]:
        """Bytes sent across each cut, both directions and headers included."""
        found: dict[int, int] = {}
        for total in self.wire:
            found[total.cut] = found.get(total.cut, 0) + total.nbytes
        return found

    def sent(self, direction: Direction) -> int:
        return sum(total.nbytes for total in self.wire if total.direction == direction)

    def mbps(self, nbytes: int) -> str:
        """The rate of so many bytes over the step, in Mbit/s."""
        return f"{nbytes * 8 / self.step_s / 1e6:,.1f}" if self.step_s > 0 else NOTHING


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run, known before its first step, for the display and the report.

    `cuts` is empty for a single stage. `methods` has a label such as "aqsgd 4-bit" for each cut
    and direction. `exchanged` is how many parameters are trained, and replicas exchange; copies of
    a tied one count. `unit` is what the loss is averaged over.
    """

    name: str
    folder: Path
    stages: int
    replicas: int
    schedule: str
    microbatches: int
    cuts: tuple[int, ...]
    methods: Mapping[WireKey, str]
    total_steps: int
    parameters: int
    exchanged: int
    machine: str
    versions: Mapping[str, str]
    config_digest: str
    unit: Literal["token", "sample"] = "token"
    shards: int = 1

    @property
    def size(self) -> str:
        """Number of parameters, and how many are trained if not all."""
        size = f"{format_count(self.parameters)} parameters"
        if self.exchanged >= self.parameters:
            return size
        return f"{size} ({format_count(self.exchanged)} trained)"

    @property
    def shape(self) -> list[str]:
        counts = [(self.stages, "stage"), (self.replicas, "replica")]
        counts += [(self.shards, "shard")] if self.shards > 1 else []
        pieces = [f"{n} {word}{'s' * (n != 1)}" for n, word in counts]
        microbatches = f"{self.microbatches} microbatch{'es' * (self.microbatches != 1)}"
        return [self.size, *pieces, self.schedule, microbatches]

    def wire_keys(self, records: Iterable[StepRecord] = ()) -> list[WireKey]:
        """Every cut and direction in table order, also earlier cuts found in `records`."""
        counted = (count.cut for record in records for count in record.wire)
        return [(cut, way) for cut in sorted({*self.cuts, *counted}) for way in DIRECTIONS]

    def method(self, key: WireKey) -> str:
        return self.methods.get(key, EARLIER_CUT)


_RECORD = TypeAdapter(StepRecord)


class MetricsWriter:
    """Appends one JSON object per step to a file, flushed after every `write`.

    With `resume_step` None the file must be new. Otherwise records of later steps and an
    incomplete last line are dropped first, atomically.

    Raises:
        ValueError: the file holds an earlier run, or a line in it is not a step record.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if resume_step is not None:
            _truncate(path, resume_step)
        elif path.exists() and path.stat().st_size > 0:
            raise ValueError(
                f"{path} already holds the metrics of a run; resume that run or use another folder"
            )
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, record: StepRecord) -> None:
        """Append one step. A loss that is NaN or infinite is stored as null.

        What a full disk has no room for is kept, and written when there is some.
        """
        warned, self._waiting = bool(self._waiting), self._waiting + _line(record)
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not warned:
                _log.warning("%s: steps wait to be written: %s", self._file.name, disk.why(error))

    def rewrite(self, records: Sequence[StepRecord]) -> None:
        """Hold these alone; what a full disk has no room for stays as it was, with a warning."""
        path = Path(self._file.name)
        try:
            _rewrite(path, records)
        except OSError as error:
            _log.warning("%s: later steps are in it twice: %s", path, disk.why(error))
            return
        self._file.close()
        self._file, self._waiting = path.open("ab", buffering=0), b""

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepRecord]:
    """Read every step of a metrics file; an incomplete last line is left out.

    Raises:
        ValueError: a complete line is not a step record; the message names file and line.
    """
    *lines, rest = path.read_bytes().split(b"\n")
    records = [parse_record(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    if rest:
        # Incomplete if the process was killed while writing.
        with suppress(ValidationError):
            records.append(_RECORD.validate_json(rest))
    return records


def parse_record(line: bytes, where: str) -> StepRecord:
    """A line of the file; `where` it stands is named.

    Raises:
        ValueError: it is not a step record.
    """
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        raise ValueError(
            f"{where}: not a step record ({field}: {first['msg']}); "
            "remove that line or restore the file from a copy"
        ) from None


def _line(record: StepRecord) -> bytes:
    return _RECORD.dump_json(record, by_alias=True) + b"\n"


def _truncate(path: Path, last_step: int) -> None:
    """Rewrite the file with the records up to `last_step`, atomically."""
    if not path.exists():
        return
    _rewrite(path, [record for record in read_metrics(path) if record.step <= last_step])


def _rewrite(path: Path, records: Iterable[StepRecord]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(_line(record) for record in records)
        file.flush()
        disk.flush(file.fileno())
    disk.replace(partial, path)

"""Which ends of cuts cache activations, and how many samples each has room for."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.words import format_bytes
from thinpipe.pipeline.models.paths import user_path
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction


@dataclass(frozen=True)
class End:
    """The memory at one end of a direction of a cut.

    It holds `held` of the `samples` that a replica visits, and `most` once it visits those of lost
    replicas, too.
    """

    cut: int
    direction: Direction
    side: Literal["sender", "receiver"]
    position: int
    row_nbytes: int
    samples: int = 0
    held: int = 0
    most: int = 0

    @property
    def nbytes(self) -> int:
        """At most."""
        return self.most * self.row_nbytes


def row_nbytes(config: RunConfig, spec: Spec) -> int:
    """Bytes per sample at one end of a direction; 0 for boundaries without a memory."""
    return spec.row_nbytes(*config.message_shape)


def sample_capacity(config: RunConfig, position: int) -> int | None:
    """Samples that the budget of a rank holds at each of its ends; None without a budget.

    Raises:
        ConfigError: it is too small for a single sample.
    """
    budget = config.memory.budget
    per_sample = _per_sample(config, position)
    if budget is None or not per_sample:
        return None
    in_progress = 0 if config.memory.tier == "disk" else batch_of_rank(config)
    samples = budget // per_sample - in_progress
    if samples < 1:
        most = max(_per_sample(config, end.position) for end in cache_ends(config))
        raise ConfigError(
            f"memory.budget = {format_bytes(budget)}: a sample takes {format_bytes(per_sample)} on "
            f"pipeline rank {position}, and {in_progress} more are written during a step; use "
            f"{_rounded_up((in_progress + 1) * most)} or more, the boundaries' memory at 8 or 4 "
            "bits, or another kind of boundary"
        )
    return samples


def memory_folder(config: RunConfig) -> Path:
    """Folder for the files of the disk tier."""
    folder = config.memory.folder
    return config.run.path if folder is None else user_path(folder).resolve()


def cache_ends(config: RunConfig) -> list[End]:
    """Every memory, still empty, of the cuts between two ranks."""
    ranks, found = config.stage_ranks, []
    for stage, cut in enumerate(config.pipeline.cuts):
        upper, lower = ranks[stage], ranks[stage + 1]
        for direction in DIRECTIONS:
            row = row_nbytes(config, config.specs[cut, direction])
            if not row or upper == lower:
                continue
            source, target = (upper, lower) if direction == "forward" else (lower, upper)
            found.append(End(cut, direction, "sender", source, row))
            found.append(End(cut, direction, "receiver", target, row))
    return found


def most_samples(config: RunConfig, sequences: int) -> int:
    """That a DP rank visits once no more replicas can be lost."""
    return sequences // (config.fewest_replicas * config.pipeline.shards)


def batch_of_rank(config: RunConfig) -> int:
    """Samples of a step on a DP rank."""
    return config.train.batch_size // config.pipeline.dp_size


def _per_sample(config: RunConfig, position: int) -> int:
    return sum(end.row_nbytes for end in cache_ends(config) if end.position == position)


def _rounded_up(nbytes: int) -> str:
    """Rounded up to three digits, as a size that a run file can contain."""
    step = max(1, 10 ** (len(str(nbytes)) - 3))
    return format_bytes(math.ceil(nbytes / step) * step)

"""Step time with memories on disk.

    python -m benchmarks.memory_tiers --json out.jsonl

Times whole steps of a pipeline in one process (`benchmarks/single_process.py`: every end of
every cut has its memory, as on ranks of their own) with memories in RAM and on disk, alternating,
after an epoch that fills them. The losses of both must be equal. Takes less than two minutes on an
idle core.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import Records, command_line, format_table, quantiles
from benchmarks.single_process import in_process
from thinpipe.launch.config.caches import row_nbytes
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.launch.host.words import format_bytes
from thinpipe.pipeline.batch import Batch

TIERS = ("ram", "disk")


@dataclass(frozen=True)
class Scale:
    """Size of the timed run. `rounds`: how often each tier is timed."""

    samples: int = 96
    batch: int = 16
    epochs: int = 3
    width: int = 256
    tokens: int = 128
    rounds: int = 3

    def run(self, tier: str, folder: Path) -> RunConfig:
        """Four layers in four stages: three cuts, six memories."""
        return RunConfig.model_validate(
            {
                "model": {"layers": 4, "width": self.width, "heads": 8, "context": self.tokens},
                "data": {"sequence_length": self.tokens},
                "pipeline": {"cuts": [1, 2, 3]},
                "boundary": [{"forward": {"kind": "aqsgd", "bits": 3, "memory": "bf16"}}],
                "memory": {"tier": tier, "folder": str(folder)},
                "train": {"batch_size": self.batch},
            }
        )

    def sampler(self) -> EpochSampler:
        """The order of the run's samples."""
        return EpochSampler(self.samples, batch_size=self.batch, replicas=1, replica=0, seed=0)


def steps(scale: Scale, tier: str, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of every step after the first epoch, and all losses."""
    sampler, seconds, losses = scale.sampler(), [], []
    shape = (scale.samples, scale.tokens + 1)
    tokens = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    total = scale.epochs * sampler.steps_per_epoch
    torch.manual_seed(0)
    with in_process(scale.run(tier, folder), total_steps=total) as built:
        built.engine.begin(sampler.all_ids(), sampler.ids(0))
        for step in range(total):
            ids = sampler.ids(step)
            batch = Batch(tokens[ids, :-1].contiguous(), tokens[ids, 1:].contiguous(), ids)
            start = time.perf_counter()
            losses.append(built.engine.train_step(batch, step, sampler.ids(step + 1)).loss)
            seconds.append(time.perf_counter() - start)
        built.engine.close()
    return seconds[sampler.steps_per_epoch :], losses


def compare_tiers(scale: Scale, folder: Path, records: Records) -> str:
    """Time both tiers, alternating; returns a table.

    Raises:
        RuntimeError: the losses of the tiers differ.
    """
    seconds: dict[str, list[float]] = {tier: [] for tier in TIERS}
    losses: dict[str, list[float]] = {}
    steps(scale, "ram", folder)  # compiles and warms up
    for turn in range(scale.rounds):
        for tier in TIERS:
            found, losses[tier] = steps(scale, tier, folder)
            seconds[tier] += found
            print(f"round {turn + 1}: {tier}: {median(found):.3f} s per step", flush=True)
    if losses["ram"] != losses["disk"]:
        raise RuntimeError("losses differ between the tiers; timings would mean nothing")
    run = scale.run("ram", folder)
    row = row_nbytes(run, run.boundary_at(1).forward)
    moved = 2 * 6 * scale.batch * row  # read and written, at six ends
    base, rows = median(seconds["ram"]), []
    for tier in TIERS:
        times = quantiles(seconds[tier])
        records.add({**asdict(scale), "tier": tier}, {"step_s": times, "moved_nbytes": moved})
        cells = [f"{times[q]:.3f}" for q in ("p20", "p50", "p80")]
        rows.append([tier, *cells, f"{times['p50'] / base:.3f}"])
    note = f"{format_bytes(moved)} to and from disk per step"
    return f"{format_table(['tier', '20 %', 'median s', '80 %', 'vs RAM'], rows)}\n\n{note}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    command = command_line("benchmarks.memory_tiers", __doc__)
    for name in ("samples", "batch", "epochs", "width", "tokens", "rounds"):
        command.add_argument(f"--{name}", type=int, default=getattr(Scale, name))
    command.add_argument("--folder", type=Path, default=Path(), help="where the disk tier writes")
    options = vars(command.parse_args(arguments))
    folder, records = options.pop("folder").resolve(), Records(options.pop("json"))
    torch.set_num_threads(1)
    print(compare_tiers(Scale(**options), folder, records))


if __name__ == "__main__":
    main()

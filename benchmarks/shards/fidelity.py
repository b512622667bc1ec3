"""Held-out loss of a decoder whose only stage is held by several ranks, by what they send.

    python -m benchmarks.shards.fidelity --text train.txt --seeds 3 --shards 2 4 --json out.jsonl

Every run trains from scratch on a text and is evaluated, with exact weights, on its end. The first
method is FSDP2 in 32 bits; others are compared with it at the same seed and number of shards.
"""

import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fidelity.finetuning import Scale, sequences
from benchmarks.harness import (
    Records,
    Row,
    command_line,
    summary,
    with_baseline,
    with_gaps,
    write_tokenizer,
)
from benchmarks.replicas.settings import GPT2
from thinpipe.launch.build import build
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.pipeline.comm.gloo import GlooTransport

BASELINE = "fsdp 32"


def _qsdp(weight_bits: int, gradient_bits: int, **options: str) -> dict[str, Any]:
    bits = {"weight_bits": weight_bits, "gradient_bits": gradient_bits}
    return {"method": "qsdp", **bits, **options}


METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {"method": "fsdp"},
    "W8G8": _qsdp(8, 8),
    "W6G4 shift": _qsdp(6, 4),
    "W6G4 learned": _qsdp(6, 4, weight_rounding="learned"),
    "W4G4 shift": _qsdp(4, 4),
    "W4G4 differences": _qsdp(4, 4, weights="differences"),
    "W4G4 nearest": _qsdp(4, 4, weight_rounding="nearest", gradient_rounding="nearest"),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    label: str
    shards: int
    seed: int


def run_config(case: Case, scale: Scale) -> RunConfig:
    """The settings of a run."""
    return RunConfig.model_validate(
        {
            "run": {"seed": case.seed},
            "model": {
                "layers": scale.layers,
                "width": scale.width,
                "heads": scale.heads,
                "vocab": scale.vocab,
                "context": scale.tokens,
            },
            "data": {"sequence_length": scale.tokens},
            "pipeline": {"shards": case.shards, "microbatches": 1, "device": "cpu"},
            "shards": METHODS[case.label],
            "train": {
                "batch_size": scale.pretrain_batch,
                "lr": scale.pretrain_lr,
                "warmup_steps": scale.pretrain_steps // 20,
            },
        }
    )


def _train(
    rank: int, case: Case, scale: Scale, sets: tuple[SampleSet, SampleSet], folder: str
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.shards
    )
    run = run_config(case, scale)
    transport = GlooTransport(1, 1, timeout_s=600, shards=case.shards)
    torch.manual_seed(case.seed)
    built = build(run, transport, run_id=1, total_steps=scale.pretrain_steps)
    samples, held_out = sets
    sampler = EpochSampler(
        len(samples),
        batch_size=scale.pretrain_batch,
        replicas=case.shards,
        replica=rank,
        seed=case.seed,
    )
    losses = []
    for step in range(scale.pretrain_steps):
        totals = built.engine.train_step(samples.batch(sampler.ids(step)), step)
        built.lr_schedule.step()
        losses.append(totals.loss)
    tallies = []
    size = scale.pretrain_batch * case.shards
    for first in range(0, len(held_out) - size + 1, size):
        own = torch.arange(first, first + size).tensor_split(case.shards)[rank]
        tallies.append(built.engine.eval_step(held_out.batch(own), 0, compressed=False))
    loss_sum, count = (sum(column) for column in zip(*tallies, strict=True))
    if rank == 0:
        numbers = {
            "loss": loss_sum / count,
            "training loss": statistics.fmean(losses[-20:]),
            "MB weights": totals.weight_bytes / 1e6,
            "MB gradients": totals.gradient_bytes / 1e6,
        }
        torch.save(numbers, f"{folder}/found")
    transport.close()
    dist.destroy_process_group()


def measure(case: Case, scale: Scale, sets: tuple[SampleSet, SampleSet]) -> Row:
    """Train in processes of its own; bytes are those of a step, over all ranks."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _train, args=(case, scale, sets, folder), nprocs=case.shards
        )
        found = torch.load(f"{folder}/found")
        return Row(case.label, found, {"shards": case.shards}, case.seed)


def read_text(text: Path, scale: Scale) -> tuple[SampleSet, SampleSet]:
    """Sequences to train on, and held-out ones from the text's end."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), text, vocab=scale.vocab)
        return sequences(text, scale, "all", scale.held_out, tokenizer=folder)


def main() -> None:
    """Command line."""
    command = command_line("benchmarks.shards.fidelity", __doc__)
    command.add_argument("--text", type=Path, required=True)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument("--shards", type=int, nargs="+", default=[2, 4])
    command.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    command.add_argument("--steps", type=int, default=GPT2.pretrain_steps)
    command.add_argument("--lr", type=float, default=GPT2.pretrain_lr)
    options = command.parse_args()
    methods = with_baseline(options.methods, BASELINE)
    scale = replace(GPT2, pretrain_steps=options.steps, pretrain_lr=options.lr)
    sets, records = read_text(options.text, scale), Records(options.json)
    rows: list[Row] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for shards in options.shards:
            for label in methods:
                row = measure(Case(label, shards, seed), scale, sets)
                rows.append(with_gaps(row, rows, BASELINE, ["loss"]))
                records.add({"scale": asdict(scale)}, rows[-1])
                print(rows[-1], flush=True)
    columns = {"loss": ".4f", "loss gap": "+.4f", "MB weights": ".2f", "MB gradients": ".2f"}
    print(summary(rows, columns))


if __name__ == "__main__":
    main()

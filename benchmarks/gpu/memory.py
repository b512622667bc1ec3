"""The peak of a GPU's memory in training steps, against the bytes counted before the run.

    python -m benchmarks.gpu.memory --json memory.jsonl

A single stage, so that the peak is that of one rank. Peaks are of tensors, without the CUDA context
and without what torch's allocator keeps unused.
"""

import gc
from typing import Any

import torch

from benchmarks.harness import Records, Row, command_line
from benchmarks.single_process import in_process
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.memory.model import rank_memory
from thinpipe.pipeline.batch import Batch

_STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"pipeline": {"precision": "bf16"}},
    "bf16, checkpointing": {
        "pipeline": {"precision": "bf16"},
        "model": {"activation_checkpointing": True},
    },
    "fp32, offload": {"pipeline": {"offload": True}},
    "bf16, checkpointing, offload": {
        "pipeline": {"precision": "bf16", "offload": True},
        "model": {"activation_checkpointing": True},
    },
}


def run_config(case: str, layers: int, width: int, device: str) -> RunConfig:
    """The shape of a GPT-2 with 512 tokens, all in one stage."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": layers, "width": width, "heads": width // 64, "context": 512},
        "data": {"sequence_length": 512},
        "pipeline": {"microbatches": 4, "schedule": "GPipe", "device": device},
        "train": {"batch_size": 16},
    }
    for section, values in CASES[case].items():
        base[section] |= values
    return RunConfig.model_validate(base)


def measure(case: str, config: RunConfig) -> Row:
    """Train a few steps on the GPU, and count the same run; bytes.

    `held` is after the steps, `reserved` with what the allocator keeps.
    """
    gc.collect()  # of the last case
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)
    with in_process(config, total_steps=_STEPS) as built:
        for step in range(_STEPS):
            tokens_BT = torch.randint(256, (16, 513), generator=generator)
            inputs_BT, targets_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
            built.engine.train_step(Batch(inputs_BT, targets_BT, torch.arange(16)), step)
        peak = torch.cuda.max_memory_allocated() - before
        held, reserved = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_reserved()
    (counted,) = rank_memory(config)
    in_ram = counted.activations + counted.optimizer if config.pipeline.offload else 0
    numbers = {"counted": counted.total - in_ram, "peak": peak, "held": held, "reserved": reserved}
    return Row(case, numbers)


def main() -> None:
    """The command line."""
    command = command_line("benchmarks.gpu.memory", __doc__)
    command.add_argument("--layers", type=int, default=12)
    command.add_argument("--width", type=int, default=768)
    options = command.parse_args()
    records = Records(options.json)
    for case in CASES:
        row = measure(case, run_config(case, options.layers, options.width, "cuda"))
        records.add(vars(options) | {"json": None}, row)
        print(row, flush=True)


if __name__ == "__main__":
    main()

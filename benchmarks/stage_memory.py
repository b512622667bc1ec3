"""Peak memory of building one stage of a large model, and the files that it opens.

    python -m benchmarks.stage_memory                      # GPT2-XL's shape, random weights
    python -m benchmarks.stage_memory --write xl           # the same from fp32 shards, 6.2 GB
    python -m benchmarks.stage_memory --model examples/models/gpt2 --stages 2

Each stage is built in its own process, and reads its weights if the folder has any. The process
without a stage is the baseline: Python, torch, transformers and the model on the meta device.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}
_SHARD_NBYTES = 500 * 10**6


def main(arguments: list[str] | None = None) -> None:
    """Print parameters, peak resident memory, files opened and seconds of every stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="folder with config.json, perhaps weights")
    source.add_argument("--write", type=Path, help="new folder for random weights to read")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--only", type=int, nargs="*", help="which stages; default: all")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or options.write or Path(scratch)
        if options.model is None:
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(_GPT2_XL), encoding="utf-8")
        if options.write is not None:
            write_weights(folder)
        heads = ("stage", "parameters", "MB fp32", "peak MB", "files", "seconds")
        print(" ".join(f"{head:>12}" for head in heads))
        for stage in [None, *(options.only or range(options.stages))]:
            _print_row(folder, stage, options.stages)


def write_weights(folder: Path, *, shard_nbytes: int = _SHARD_NBYTES) -> None:
    """Fill a folder that holds config.json with small random fp32 weights, a shard at a time."""
    from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
    from thinpipe.pipeline.models.hf.shards import INDEX
    from thinpipe.pipeline.models.hf.weights import tied_names

    whole = HuggingFaceConfig(config=str(folder)).whole()
    copies = tied_names(whole)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in whole.state_dict().items():
        if name not in copies:
            shard[name] = torch.empty(tensor.shape).uniform_(-0.02, 0.02)
            if sum(part.nbytes for part in shard.values()) >= shard_nbytes:
                flush()
    if shard:
        flush()
    (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def measure(folder: Path, stage: int | None, stages: int) -> dict[str, float]:
    """Build one stage (or none) in this process."""
    from thinpipe.pipeline.models.hf import shards
    from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
    from thinpipe.pipeline.models.hf.stage import build_stage

    weights = (folder / shards.SINGLE).exists() or (folder / shards.INDEX).exists()
    config = HuggingFaceConfig(**{"pretrained" if weights else "config": str(folder)})
    start, parameters = time.perf_counter(), 0
    with mock.patch("thinpipe.pipeline.models.hf.shards.safe_open", wraps=safe_open) as opening:
        if stage is None:
            config.whole()
        else:
            bounds = [config.layers * i // stages for i in range(stages + 1)]
            module = build_stage(config, bounds[stage], bounds[stage + 1], seed=0, device="cpu")
            parameters = sum(parameter.numel() for parameter in module.parameters())
    return {
        "parameters": parameters,
        "peak_mb": _peak_kib() * 1024 / 1e6,
        "files": len({call.args[0] for call in opening.call_args_list}),
        "seconds": time.perf_counter() - start,
    }


def _peak_kib() -> int:
    """Peak resident memory of this program; getrusage would include the parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0])


def _print_row(folder: Path, stage: int | None, stages: int) -> None:
    code = (
        "import json, pathlib; from benchmarks.stage_memory import measure;"
        f"print(json.dumps(measure(pathlib.Path({str(folder)!r}), {stage}, {stages})))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    name = "none" if stage is None else str(stage)
    print(
        f"{name:>12} {row['parameters']:>12,} {4 * row['parameters'] / 1e6:>12.1f} "
        f"{row['peak_mb']:>12.1f} {row['files']:>12} {row['seconds']:>12.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()

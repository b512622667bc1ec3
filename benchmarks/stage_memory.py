"""Peak memory of building one stage of a large model, each in a process of its own.

    python -m benchmarks.stage_memory                      # GPT2-XL in 8 stages
    python -m benchmarks.stage_memory --model examples/models/gpt2 --stages 2

With a folder that holds weights, the stage reads them. The process without a stage is the floor:
Python, torch and transformers.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}


def main(arguments: list[str] | None = None) -> None:
    """Print parameters, seconds and peak resident memory of every stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder with config.json, perhaps weights")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--only", type=int, nargs="*", help="which stages; default: all")
    options = parser.parse_args(arguments)
    print(f"{'stage':>8} {'parameters':>12} {'MB fp32':>9} {'peak MB':>9} {'seconds':>8}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or _config_folder(Path(scratch))
        for stage in [None, *(options.only or range(options.stages))]:
            _print_row(folder, stage, options.stages)


def measure(folder: Path, stage: int | None, stages: int) -> dict[str, float]:
    """Build one stage (or none) in this process."""
    from pipeline.huggingface import build_stage, lay_out
    from pipeline.huggingface_config import HuggingFaceConfig

    weights = (folder / "model.safetensors").exists() or list(folder.glob("*.index.json"))
    config = HuggingFaceConfig(**{"pretrained" if weights else "config": str(folder)})
    start, parameters = time.perf_counter(), 0
    if stage is None:
        lay_out(config)
    else:
        bounds = [config.layers * i // stages for i in range(stages + 1)]
        module = build_stage(config, bounds[stage], bounds[stage + 1], seed=0, device="cpu")
        parameters = sum(parameter.numel() for parameter in module.parameters())
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.perf_counter() - start
    return {"parameters": parameters, "peak_mb": peak_kib * 1024 / 1e6, "seconds": seconds}


def _print_row(folder: Path, stage: int | None, stages: int) -> None:
    code = (
        "import json, pathlib; from benchmarks.stage_memory import measure;"
        f"print(json.dumps(measure(pathlib.Path({str(folder)!r}), {stage}, {stages})))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    name = "none" if stage is None else str(stage)
    print(
        f"{name:>8} {row['parameters']:>12,} {4 * row['parameters'] / 1e6:>9.1f} "
        f"{row['peak_mb']:>9.1f} {row['seconds']:>8.1f}"
    )


def _config_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(_GPT2_XL))
    return folder


if __name__ == "__main__":
    main()

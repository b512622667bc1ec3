"""Memory counted before a run beside the peak that its ranks reach.

    python -m benchmarks.memory_count --json memory.jsonl

Trains each case on this machine with `thinpipe train`. A rank's peak is that of its resident
memory (VmHWM) without what it shares with the server that it was forked from. Counted is what
`--dry-run`, `doctor` and the start count for that rank.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from transformers import GPT2Config, LlamaConfig

from benchmarks.harness import Records, format_table
from thinpipe.launch.config.run import RunConfig, load_config, write_config
from thinpipe.launch.memory.host import host_needs

_PAUSE_S = 0.3
_TOKENS, _VOCAB, _LAYERS = 128, 512, 8
_SEQUENCES = 48
_LIMIT_S = 240.0

AQSGD = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "direct", "bits": 8}}]
CASES: dict[str, dict[str, Any]] = {
    "gpt2, 2 stages, fp32": {"model": "gpt2", "pipeline": {"cuts": [4]}},
    "gpt2, 4 stages, AQ-SGD": {
        "model": "gpt2",
        "pipeline": {"cuts": [2, 4, 6]},
        "boundary": AQSGD,
    },
    "gpt2, 2 stages, bf16": {"model": "gpt2", "pipeline": {"cuts": [4], "precision": "bf16"}},
    "gpt2, 2 stages, checkpointing": {
        "model": "gpt2",
        "pipeline": {"cuts": [4]},
        "options": {"activation_checkpointing": True},
    },
    "llama, 3 stages, fp32": {"model": "llama", "pipeline": {"cuts": [3, 6]}},
    "llama, 2 x 2 CocktailSGD": {
        "model": "llama",
        "pipeline": {"cuts": [4], "replicas": 2},
        "gradcomp": {"method": "cocktail"},
    },
    "gpt2, 2 shards": {"model": "gpt2", "pipeline": {"cuts": [], "shards": 2}},
}


def _model(kind: str, width: int, folder: Path) -> None:
    heads = width // 64
    if kind == "gpt2":
        made: Any = GPT2Config(
            n_layer=_LAYERS, n_embd=width, n_head=heads, n_positions=_TOKENS, vocab_size=_VOCAB
        )
    else:
        made = LlamaConfig(
            num_hidden_layers=_LAYERS,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 8 * 8,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            vocab_size=_VOCAB,
            max_position_embeddings=_TOKENS,
        )
    made.save_pretrained(folder)


def config_of(case: dict[str, Any], folder: Path, *, width: int) -> RunConfig:
    """The run of a case, with its model and text in the folder."""
    _model(case["model"], width, folder / "model")
    text = folder / "text.txt"
    text.write_bytes(b"A sentence with some words in it. " * (2 * _SEQUENCES * _TOKENS // 30))
    sections = {
        "run": {"folder": str(folder / "run")},
        "model": {"config": str(folder / "model"), **case.get("options", {})},
        "data": {
            "path": str(text),
            "sequence_length": _TOKENS,
            "train_sequences": _SEQUENCES,
            "eval_sequences": 8,
        },
        "train": {"batch_size": 16, "epochs": 1},
        "checkpoint": {"every_steps": 2},
        "boundary": case.get("boundary", []),
        "gradcomp": case.get("gradcomp", {}),
        "pipeline": {"microbatches": 4, "device": "cpu", **case["pipeline"]},
    }
    return RunConfig.model_validate(sections)


def _own_peak(pid: int) -> int:
    """Bytes that only this process has had at most until now."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    shared = sum(int(line.split()[1]) for line in lines if line.startswith("Shared_"))
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * (int(status.partition("VmHWM:")[2].split()[0]) - shared)


def peaks(config: RunConfig, folder: Path) -> dict[int, int]:
    """Peak of each rank of a run, in bytes.

    Raises:
        RuntimeError: the run failed.
    """
    write_config(config, folder / "run.toml")
    command = [sys.executable, "-m", "thinpipe.launch", "train", str(folder / "run.toml")]
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    found: dict[int, int] = {}
    limit_s = time.monotonic() + _LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < limit_s:
            for child in psutil.Process(process.pid).children(recursive=True):
                _sample(child, found)
            time.sleep(_PAUSE_S)
    finally:
        process.kill()
        code = process.wait()
    if code:
        raise RuntimeError((folder / "log").read_text(encoding="utf-8"))
    return found


def _sample(process: psutil.Process, found: dict[int, int]) -> None:
    try:
        name, _, rank = process.name().partition(" ")
        if name == "thinpipe" and rank.isdigit():
            found[int(rank)] = max(found.get(int(rank), 0), _own_peak(process.pid))
    except (psutil.NoSuchProcess, OSError, IndexError):
        return  # it has ended


def measure(case: dict[str, Any], *, width: int) -> list[tuple[int, int]]:
    """(counted, peak) of each rank, in bytes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(case, folder, width=width)
        found = peaks(config, folder)
        config = load_config(folder / "run" / "config.toml")
        counted = [
            host_needs(config, _SEQUENCES, [rank]).total for rank in range(config.world_size)
        ]
    return [(counted[rank], found[rank]) for rank in sorted(found)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.memory_count", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records, rows = Records(options.json), []
    for name in options.cases:
        for rank, (counted, peak) in enumerate(measure(CASES[name], width=options.width)):
            records.add({"case": name, "rank": rank}, {"counted": counted, "peak": peak})
            sizes = (f"{nbytes / 2**20:.0f}" for nbytes in (counted, peak))
            rows.append([name, str(rank), *sizes, f"{counted / peak - 1:+.0%}"])
            print(" ".join(rows[-1]), flush=True)
    print(format_table(("case", "rank", "counted MiB", "peak MiB", "counted / peak"), rows))


if __name__ == "__main__":
    main()

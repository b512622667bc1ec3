"""RAM and seconds of reading text: the process that tokenizes, and every other rank.

    python -m benchmarks.data --tokenizer bytes FOLDER --json out.jsonl

Each size is tokenized in a process of its own, by bytes or by a tokenizer; then another one
maps what was made and reads a pass of batches, as a rank does. RAM is the largest resident set,
beside that of a process that only imports the same. The rate is compared with `datasets.map` over
lines in batches, with the same tokenizer in as many threads, on the first 20 MB.
`--quick` leaves out 2 GB, which takes tens of minutes with a tokenizer.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Records, command_line, format_table
from thinpipe.launch.data.reading.files import find_files
from thinpipe.launch.host.cache import CACHE
from thinpipe.launch.host.words import format_bytes, format_duration

_COMPARED_NBYTES = 20_000_000
_BATCHES, _BATCH = 400, 16


@dataclass(frozen=True)
class Row:
    """RAM (bytes) above a process without data, of the one that tokenizes and of a rank."""

    nbytes: int
    tokenizer: str
    tokens: int
    tokenizing_s: float
    tokenizing_ram: int
    opening_s: float
    rank_ram: int
    share_of_map: float | None
    """Of the rate of `datasets.map`; None where that was not run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the rows."""
    parser = command_line("benchmarks.data", __doc__)
    parser.add_argument("--tokenizer", nargs="+", default=["bytes"], help="bytes, or folders")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 200, 2000])
    parser.add_argument("--quick", action="store_true", help="20 and 200 MB alone")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        _part(*options.part)
        return
    sizes = [20, 200] if options.quick else options.megabytes
    rows, records = [], Records(options.json)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = f"{folder}/cache"
        for megabytes in sizes:
            text = _text(Path(folder) / f"{megabytes}.txt", megabytes * 10**6)
            for tokenizer in options.tokenizer:
                rows.append(_measured(text, tokenizer))
                records.add({"megabytes": megabytes, "tokenizer": tokenizer}, asdict(rows[-1]))
            text.unlink()
    print(_table(rows))


def _table(rows: Sequence[Row]) -> str:
    shown = [
        [
            format_bytes(row.nbytes),
            Path(row.tokenizer).name,
            format_duration(row.tokenizing_s),
            format_bytes(row.tokenizing_ram),
            format_duration(row.opening_s),
            format_bytes(row.rank_ram),
            "" if row.share_of_map is None else f"{row.share_of_map:.2f}",
        ]
        for row in rows
    ]
    return format_table(
        ["text", "tokenizer", "tokenized in", "RAM", "opened in", "RAM of a rank", "of map"], shown
    )


def _measured(text: Path, tokenizer: str) -> Row:
    empty = _run("empty", text, tokenizer)["ram"]
    made, opened = _run("load", text, tokenizer), _run("rank", text, tokenizer)
    compared = None
    if tokenizer != "bytes" and text.stat().st_size <= _COMPARED_NBYTES + 4096:
        rate = text.stat().st_size / made["seconds"]
        compared = rate / _run("map", text, tokenizer)["rate"]
    return Row(
        text.stat().st_size,
        tokenizer,
        made["tokens"],
        made["seconds"],
        made["ram"] - empty,
        opened["seconds"],
        opened["ram"] - empty,
        compared,
    )


def _run(what: str, text: Path, tokenizer: str) -> dict[str, Any]:
    arguments = ["--part", what, str(text), tokenizer]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.data", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _part(what: str, text: str, tokenizer: str) -> None:
    """What one process does; it prints JSON."""
    from thinpipe.launch.data.config import DataConfig
    from thinpipe.launch.data.load import load

    start, found = time.perf_counter(), dict[str, Any]()
    if what == "map":
        found["rate"] = _mapped(Path(text), tokenizer)
    elif what != "empty":
        settings: dict[str, Any] = {"path": text, "tokenizer": tokenizer, "train_sequences": "all"}
        settings |= {"sequence_length": 512, "document_marks": "none"}
        if tokenizer == "bytes":
            del settings["document_marks"]
        training, _ = load(DataConfig.model_validate(settings))
        found["seconds"] = time.perf_counter() - start
        found["tokens"] = len(training) * 512
        if what == "rank":
            chosen = random.Random(0)
            for _ in range(_BATCHES):
                training.batch([chosen.randrange(len(training)) for _ in range(_BATCH)])
    print(json.dumps({**found, "ram": _largest_resident()}))


def _mapped(text: Path, tokenizer: str) -> float:
    """Bytes a second of `datasets.map`."""
    import datasets
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = backend.encode_batch(batch["text"], add_special_tokens=False)
        return {"ids": [each.ids for each in found]}

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        lines = datasets.load_dataset(
            "text", data_files=str(text), split="train", cache_dir=cache, keep_linebreaks=True
        )
        start = time.perf_counter()
        lines.map(encode, batched=True, remove_columns=["text"])
        return text.stat().st_size / (time.perf_counter() - start)


def _text(path: Path, nbytes: int) -> Path:
    """Lines of the standard library's sources in an order drawn: no two parts are alike."""
    lines = [line for file in find_files(None, "text")[:400] for line in _lines(file)]
    chosen, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while written < nbytes:
            part = "".join(f"{chosen.choice(lines)} {chosen.random()}\n" for _ in range(10_000))
            written += file.write(part[: nbytes - written])
    return path


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="ignore").splitlines()


def _largest_resident() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()

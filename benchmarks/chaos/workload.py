"""The runs that are disturbed: small ones, whose steps take less than a tenth of a second."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.scene import BATCH, EVAL_STEPS, SAMPLES, STEPS_PER_EPOCH
from thinpipe.launch.checkpoint.files import read_manifest
from thinpipe.launch.report.metrics import read_metrics

LAYOUTS = {
    "4 stages": ["pipeline.cuts=[1,2,3]"],
    "2 x 2, cocktail": [
        "pipeline.cuts=[2]",
        "pipeline.replicas=2",
        "gradcomp.method=cocktail",
        "checkpoint.copies=2",
    ],
}
"""Settings by name. Only the second has second copies of checkpoints."""
_CONFIG = f"""
[model]
layers = 4
width = 16
heads = 2
context = 32
[data]
path = "{{text}}"
sequence_length = 32
train_sequences = {SAMPLES}
eval_sequences = 8
[pipeline]
microbatches = 2
device = "cpu"
peer_timeout_s = 45
[network]
patience_s = 6
[[boundary]]
forward = {{{{ kind = "aqsgd", bits = 3 }}}}
backward = {{{{ kind = "direct", bits = 6, rounding = "stochastic" }}}}
[train]
epochs = {{epochs}}
batch_size = {BATCH}
warmup_steps = 2
verify_every = 5
[eval]
every_epochs = {EVAL_STEPS // STEPS_PER_EPOCH}
[checkpoint]
every_steps = {{save_every}}
keep = 3
"""


@dataclass(frozen=True)
class Workload:
    """A run of so many steps in a layout."""

    folder: Path
    layout: str
    epochs: int
    save_every: int

    @property
    def steps(self) -> int:
        """All of them."""
        return self.epochs * STEPS_PER_EPOCH

    @property
    def settings(self) -> list[str]:
        """Those of the layout."""
        return LAYOUTS[self.layout]

    @property
    def config(self) -> str:
        """The run file; its text is written too."""
        text = self.folder / "text.txt"
        text.write_text(
            "".join(f"{n} squared is {n * n}.\n" for n in range(4000)), encoding="utf-8"
        )
        return _CONFIG.format(text=text, epochs=self.epochs, save_every=self.save_every)

    def calm(self) -> "Calm":
        """What it ends with on one machine, where nothing disturbs it."""
        place, file = self.folder / f"calm {self.layout}", self.folder / "calm.toml"
        file.write_text(self.config, encoding="utf-8")
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(file)]
        for setting in (f"run.folder={place}", *self.settings):
            words += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
        losses = [record.loss for record in read_metrics(place / "metrics.jsonl")]
        manifest = read_manifest(place / "checkpoints" / f"step-{self.steps}")
        return Calm(losses, [part.sha256 for part in manifest.parts])


@dataclass(frozen=True)
class Calm:
    """What an undisturbed run ends with: losses, and digests of the last checkpoint's parts."""

    losses: Sequence[float]
    digests: Sequence[str]

"""The sections [run], [train], [eval], [checkpoint], [report] and [watch]."""

import difflib
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, field_validator

from thinpipe.pipeline.models.paths import user_path


def _as_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise ValueError(f"name = {name!r}: use letters, digits, - and _, and . inside")
    return name


class RunSection(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Name, folder and seed of a run."""

    name: Annotated[str, AfterValidator(_as_folder)] = "run"
    folder: str | None = None
    seed: int = Field(0, ge=0, lt=2**31)

    @property
    def path(self) -> Path:
        """Run folder, by default runs/<name>."""
        return user_path(self.folder or f"runs/{self.name}").resolve()


_Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """AdamW with linear warm-up, then decay to zero.

    `optimizer = "adamw8bit"` is AdamW whose moments take 1 byte per value instead of 4, by
    bitsandbytes; `"muon"` is Muon for the matrices of hidden layers and AdamW for the rest;
    "module:function" is a custom one, called as `function(named_parameters, lr=...)`.

    `max_steps` ends a run earlier than `epochs`; a stream needs it, and has one epoch.

    `batch_size` is over all replicas; `clip_norm` limits the global gradient norm, 0 turns it off.
    Every `verify_every` steps ranks compare digests of what they should hold alike; 0: never.
    So many skipped steps in a row as `max_skipped` (loss or gradients not finite) end the run.
    """

    epochs: int = Field(3, ge=1, le=10**9)
    max_steps: int | None = Field(None, ge=1, le=10**12)
    batch_size: int = Field(16, ge=1)
    accumulate: int = Field(1, ge=1)
    optimizer: str = "adamw"
    lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(20, ge=0)
    decay: Literal["cosine", "linear", "none"] = "cosine"
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    clip_norm: float = Field(1.0, ge=0)
    max_skipped: int = Field(10, ge=1)
    verify_every: int = Field(100, ge=0)

    def steps(self, per_epoch: int) -> int:
        whole = self.epochs * per_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)


class EvalConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Evaluate on held-out data every `every_epochs` epochs, and after the last.

    `metrics` are measured besides the loss: "accuracy", "f1", "matthews", "pearson", "perplexity",
    "spearman", or "module:function" (see own_code.md); by default those of the model's task.
    The checkpoint of the `best` one is kept too: by "loss" or another metric, or "max NAME" or
    "min NAME" of one of your own. After `patience` evaluations that are no better the run ends.
    At the end of a run, show `samples` texts that its language model writes.
    """

    every_epochs: int = Field(1, ge=1)
    metrics: tuple[str, ...] | None = None
    best: str | None = None
    patience: int | None = Field(None, ge=1)
    samples: int = Field(0, ge=0, le=100)

    @field_validator("best")
    @classmethod
    def _one_metric(cls, best: str | None) -> str | None:
        if best is not None and not re.fullmatch(r"((max|min) )?[A-Za-z_]\w*", best):
            raise ValueError(
                f'best = "{best}": use "loss" or the name of one of eval.metrics, or of your own '
                '"max NAME" or "min NAME"'
            )
        return best

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: tuple[str, ...] | None) -> tuple[str, ...] | None:
        from thinpipe.pipeline.metrics import NAMES  # imports torch

        for name in metrics or ():
            if name not in NAMES and ":" not in name:
                near = difflib.get_close_matches(name, NAMES, n=1)
                hint = f'did you mean "{near[0]}"?' if near else f"use {', '.join(NAMES)}"
                raise ValueError(
                    f'metrics = "{name}": no such metric; {hint}; one of your own is '
                    '"module:function"'
                )
        return metrics


class CheckpointConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Save every `every_epochs` epochs (or `every_steps` steps) and at the end; keep the newest.

    Once all epochs are done, the last alone is kept, unless `keep` is set or `train.decay = "none"`
    lets the run be made longer; the activation cache is left out of it.
    With `copies = 2` each part is kept on a second machine too, so that a lost disk loses nothing.
    On SIGTERM and at the first Ctrl-C a run saves and ends, within `grace_s` seconds.
    With `ram_every`, stages are copied to RAM every so many steps, also to that of another machine.
    Then one that joins can take the place of a lost one, and all go back to such a copy.
    """

    every_epochs: int = Field(1, ge=1)
    every_steps: int | None = Field(None, ge=1)
    keep: int = Field(2, ge=1)
    copies: int = Field(1, ge=1)
    grace_s: float = Field(20.0, ge=1, le=25)
    ram_every: int | None = Field(None, ge=1)


class ElasticConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """With `min_replicas`, a run goes on without the replicas that it loses, down to so many.

    The others do the step under way again, and share the samples of a lost replica. Unless set, all
    replicas are needed: the run ends, or restarts (--max-restarts).
    """

    min_replicas: int | None = Field(None, ge=1)


class ReportConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Trackers that get the numbers of every step, next to `metrics.jsonl` and `report.html`.

    Each needs a package, which the extra of its name installs. `project` is W&B's and Trackio's.
    """

    writers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = Field("thinpipe", min_length=1)


class WatchConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A live page of the run at `http://localhost:port`, on the machine of rank 0 alone.

    It is the one of `thinpipe watch`, in a process of its own, and ends with the run.
    """

    port: int | None = Field(None, ge=1, le=65535)

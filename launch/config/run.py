"""RunConfig: one TOML file, which may extend another, and dotted overrides; strict.

    extends = "base.toml"          # read first; tables are merged, lists are replaced, and a
                                   # key set to "" removes it from base.toml
    thinpipe train run.toml --set train.lr=1e-3 --set boundary.0.forward.bits=3
    thinpipe train run.toml --set data.path=           # removes the key

Unknown names and wrong values are `ConfigError`s that name the key, the value and the remedy.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator

from thinpipe.aqsgd.config import MemoryConfig
from thinpipe.gradcomp.registry import method_names, option_aliases, parse_options
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.launch.config import checks
from thinpipe.launch.config.boundary import BoundaryConfig, Spec, boundary_at
from thinpipe.launch.config.devices import (
    check_devices,
    check_offload,
    check_shards,
    shards_notices,
)
from thinpipe.launch.config.errors import explain
from thinpipe.launch.config.model import (
    ModelSection,
    check_trained_weights,
    check_weights,
    model_kind,
    with_weights,
)
from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.config.placement import check_placement
from thinpipe.launch.config.removed import of_weights, without_removed
from thinpipe.launch.config.sections import (
    CheckpointConfig,
    ElasticConfig,
    EvalConfig,
    ReportConfig,
    RunSection,
    TrainConfig,
    WatchConfig,
)
from thinpipe.launch.config.toml import ConfigError, load_as, top_keys
from thinpipe.launch.data.config import DataConfig
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.models.own.example import Functions
from thinpipe.pipeline.models.paths import user_path
from thinpipe.pipeline.models.transformer import TransformerConfig
from thinpipe.pipeline.orders import check_schedule, stage_to_rank
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction

_LOCAL: Any = {  # paths and memory limits of a host; data are compared by digest
    "run": {"folder"},
    "memory": True,
    "report": True,
    "watch": True,
    "data": {
        **dict.fromkeys(("path", "eval_path", "tokenizer", "chat_template"), True),
        "sources": {"__all__": {"path"}},
    },
    "model": {"pretrained", "config", "from_run", "self_check", "program"},
    "network": {"key_file", "name", "listen", "peers"},
}


class RunConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Everything about a run. `gradcomp` holds `method` and one table of options per method."""

    run: RunSection = RunSection()
    model: ModelSection = TransformerConfig()
    data: DataConfig = DataConfig()
    pipeline: PipelineConfig = PipelineConfig()
    boundary: tuple[BoundaryConfig, ...] = ()
    memory: MemoryConfig = MemoryConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    elastic: ElasticConfig = ElasticConfig()
    report: ReportConfig = ReportConfig()
    watch: WatchConfig = WatchConfig()
    gradcomp: dict[str, Any] = {"method": "allreduce"}
    shards: ShardsConfig = ShardsConfig()
    network: NetworkConfig = NetworkConfig()

    @property
    def world_size(self) -> int:
        return self.pipeline.pipeline_ranks * self.pipeline.dp_size

    def mesh(self, rank: int) -> Mesh:
        pipeline = self.pipeline
        return Mesh(pipeline.pipeline_ranks, pipeline.replicas, rank, pipeline.shards)

    @property
    def method(self) -> str:
        """How replicas exchange: the name of a file in gradcomp/methods."""
        return str(self.gradcomp.get("method", "allreduce"))

    @property
    def goes_on_by(self) -> str:
        """The setting by which the run goes on if ranks are lost; empty if it ends."""
        every, least = self.checkpoint.ram_every, self.elastic.min_replicas
        if every is not None:
            return f"checkpoint.ram_every = {every}"
        if least is not None and least < self.pipeline.replicas:
            return f"elastic.min_replicas = {least}"
        return ""

    @property
    def fewest_replicas(self) -> int:
        """That the run goes on with; all, if it ends without one."""
        return self.elastic.min_replicas or self.pipeline.replicas

    @property
    def saves_in_training(self) -> bool:
        """Whether checkpoints are written while it trains, not only at the end."""
        saves, judged = self.checkpoint, (self.eval.best, self.eval.patience) != (None, None)
        often = saves.every_steps is not None or saves.every_epochs < self.train.epochs
        return often or judged or bool(self.goes_on_by)

    @property
    def method_options(self) -> BaseModel:
        return parse_options(self.method, self.gradcomp.get(self.method, {}))

    def with_cuts(self, cuts: Sequence[int]) -> "RunConfig":
        """The same run with these cuts instead of `cuts = "auto"`."""
        pipeline = self.pipeline.model_dump(exclude_none=True) | {"cuts": list(cuts)}
        return self.updated(pipeline=pipeline)

    def updated(self, **sections: Any) -> "RunConfig":
        """The same run with other sections, checked as a whole.

        Raises:
            ValidationError: they do not fit.
        """
        return RunConfig.model_validate({**dict(self), **sections})

    def with_train(self, **settings: Any) -> "RunConfig":
        """The same run with other settings of [train].

        Raises:
            ConfigError: they do not fit.
        """
        try:
            return self.updated(train={**dict(self.train), **settings})
        except ValidationError as error:
            raise ConfigError("; ".join(explain(error, RunConfig))) from None

    @property
    def message_shape(self) -> tuple[int, int]:
        """[T, D] of a sample at every cut."""
        return self.model.sample_shape(self.data.sequence_length)

    def check_model_cuts(self) -> None:
        """Check that a custom model can be cut where the cuts are.

        Raises:
            ValueError: it cannot; names layer and shape, or how many places there are.
        """
        if self.pipeline.auto_cuts:
            self.model.check_stages(self.pipeline.stages)
        else:
            self.model.check_cuts(self.pipeline.cuts)

    def boundary_at(self, cut: int) -> BoundaryConfig:
        return boundary_at(self.boundary, cut)

    @property
    def specs(self) -> dict[tuple[int, Direction], Spec]:
        return {
            (cut, direction): getattr(self.boundary_at(cut), direction)
            for cut in self.pipeline.cuts
            for direction in DIRECTIONS
        }

    @property
    def stage_ranks(self) -> dict[int, int]:
        """The rank of each stage, within its pipeline."""
        pipeline = self.pipeline
        return stage_to_rank(
            pipeline.schedule, stages=pipeline.stages, ranks=pipeline.pipeline_ranks
        )

    @property
    def pretrained(self) -> bool:
        """Whether the model was trained before, as far as the config tells."""
        return bool(self.model.from_run or getattr(self.model, "weight_files", None))

    def notices(self) -> list[str]:
        found = self.model.notices(
            cut=bool(self.pipeline.cuts),
            ties=checks.keeps_ties(self),
            tokenizer="" if self.data.factory else self.data.tokenizer,  # samples are made already
        )
        if self.method == "none" and self.pipeline.replicas > 1:
            found.append(
                'warning: gradcomp.method = "none": replicas never synchronize; for timing only'
            )
        if self.memory.folder is not None and self.memory.tier != "disk":
            found.append(
                f"note: memory.folder = {self.memory.folder!r} is not used: "
                f"memory.tier = {self.memory.tier!r} keeps nothing on disk"
            )
        found += shards_notices(self.pipeline.shards, self.shards)
        return found + self._boundary_notices()

    def _boundary_notices(self) -> list[str]:
        specs = self.specs.values()
        own = [note for spec in specs for note in spec.notices(epochs=self.train.epochs)]
        found = list(dict.fromkeys(own))
        transforms = any(spec.kind == "transform" for spec in specs)
        if transforms and not self.pretrained and not self.model.is_own:
            found.append(
                'warning: kind = "transform" is for fine-tuning, and these weights are random: '
                "such a model may get worse from the third epoch on, as all tokens share a step; "
                'use kind = "aqsgd"'
            )
        dropout = self.model.fresh_dropout
        if dropout and any(spec.remembers for spec in specs):
            found.append(
                f"warning: model.dropout = {dropout} with AQ-SGD: dropout masks differ "
                "at every visit, so the change of an activation is about 0.6 of its size (0.1-0.2 "
                f"without dropout) and most of the gain is lost; {self.model.repeat_dropout}, "
                "or use direct boundaries"
            )
        return found

    def shared(self) -> dict[str, Any]:
        """Settings that must be equal on all hosts, JSON-able: all but paths and memory limits."""
        shared = self.model_dump(mode="json", exclude=_LOCAL)
        shared["model"] |= self.model.facts()
        return shared

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _name_the_tokenizer(cls, tree: Any, info: ValidationInfo) -> Any:
        """`data.tokenizer = "model"` is the model's folder."""
        if isinstance(tree, Mapping):
            saved = info.context is not None and info.context.get("saved")
            tree = without_removed(of_weights(tree) if saved else tree)
        if not isinstance(tree, Mapping) or not isinstance(tree.get("data"), Mapping):
            return tree
        if tree["data"].get("tokenizer") != "model":
            return tree
        model = tree.get("model")
        if model_kind(model) != "folder":
            raise ValueError(
                'data.tokenizer = "model": only a model from a folder (model.pretrained) brings '
                'one; use "bytes" or a folder'
            )
        given = model if isinstance(model, Mapping) else vars(model)
        folder = given.get("config") or given.get("pretrained")
        if not isinstance(folder, str):  # [model] itself is rejected for it
            return tree
        folder = str(user_path(folder).resolve())
        return {**tree, "data": {**tree["data"], "tokenizer": folder}}

    @model_validator(mode="before")
    @classmethod
    def _choose_weights(cls, tree: Any) -> Any:
        return with_weights(tree) if isinstance(tree, Mapping) else tree

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        checks.check_cuts(self)
        self.check_model_cuts()
        check_schedule(
            self.pipeline.schedule, stages=self.pipeline.stages, ranks=self.pipeline.pipeline_ranks
        )
        check_devices(self.pipeline, self.model)
        check_weights(self.pipeline, self.model)
        check_placement(self.pipeline)
        check_shards(self.pipeline, self.shards, self.model, self.train.optimizer)
        checks.check_boundaries(self)
        checks.check_sizes(self)
        checks.check_stream(self)
        checks.check_task(self)
        checks.check_gradcomp(self)
        check_offload(self.pipeline, self.method)
        check_trained_weights(self.model, self.train, self.method, self.pipeline.replicas)
        checks.check_elastic(self)
        checks.check_ram_copies(self)
        checks.check_tie(self)
        return self


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    functions: Functions | None = None,
    saved: bool = False,
) -> RunConfig:
    """Read a run file and the files it extends, apply `a.b=c` overrides, check everything.

    `functions` are taken in place of those that the model section names. What a `saved` run's file
    has of removed settings is passed over, if its weights do not depend on it.

    Raises:
        ConfigError: naming file or override, key, value and remedy.
    """
    keys = top_keys(path)
    if "host" in keys and not keys & RunConfig.model_fields.keys():
        raise ConfigError(
            f"{path}: this is a hosts file; pass it to `thinpipe launch`, before the run file: "
            "thinpipe launch HOSTS.TOML RUN.TOML"
        )
    aliases = {
        f"gradcomp.{method}.{alias}": f"gradcomp.{method}.{option}"
        for method in method_names()
        for alias, option in option_aliases(method).items()
    }
    context = {"functions": functions, "saved": saved} if functions or saved else None
    return load_as(RunConfig, path, overrides, aliases=aliases, context=context)


def load_run(folder: Path, *, functions: Functions | None = None) -> RunConfig:
    """The config of a run, from its folder; `functions` as for `load_config`.

    Raises:
        ConfigError: it is not the folder of a run.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder}: holds no config.toml; name the folder of a run")
    return load_config(folder / "config.toml", functions=functions, saved=True)


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved config as TOML; reading it back gives an equal one."""
    fields = config.model_dump(mode="json", exclude_none=True)
    path.write_text(tomlkit.dumps(fields), encoding="utf-8")

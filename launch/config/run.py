"""RunConfig: one TOML file, which may extend another, and dotted overrides; strict.

    extends = "base.toml"          # read first; tables are merged, lists are replaced, and a
                                   # key set to "" removes it from base.toml
    thinpipe train run.toml --set train.lr=1e-3 --set boundary.0.forward.bits=3
    thinpipe train run.toml --set data.path=           # removes the key

Unknown names and wrong values are `ConfigError`s that name the key, the value and the remedy.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomlkit
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from thinpipe.aqsgd.config import AqsgdConfig, AutoConfig, GradientAqsgdConfig, MemoryConfig
from thinpipe.aqsgd.transform.config import GradientTransformConfig, TransformConfig
from thinpipe.gradcomp.registry import load_method, method_names, option_aliases, parse_options
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.launch.config.devices import check_devices
from thinpipe.launch.config.errors import explain
from thinpipe.launch.config.model import (
    ModelSection,
    could_be_tied,
    fresh_dropout,
    is_frozen,
    model_kind,
)
from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.config.placement import check_placement
from thinpipe.launch.config.shards import check_shards
from thinpipe.launch.config.toml import ConfigError, load_as, top_keys
from thinpipe.launch.data.load import DataConfig
from thinpipe.launch.data.tokenizer import BYTES
from thinpipe.pipeline.comm.guard import GuardConfig
from thinpipe.pipeline.config import DirectConfig, PipelineConfig, RawConfig, StatelessConfig
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.masks import check_masks
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.transformer import TransformerConfig
from thinpipe.pipeline.schedule import check_schedule, stage_to_rank
from thinpipe.pipeline.wire.header import DIRECTIONS, Direction

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
_LOCAL: Any = {  # paths and memory limits of a host; data are compared by digest
    "run": {"folder"},
    "memory": True,
    "data": {"path": True, "eval_path": True, "tokenizer": True, "sources": {"__all__": {"path"}}},
    "model": {"pretrained", "config"},
    "network": {"key_file", "name", "listen", "peers"},
}


def _known_names(value: Any) -> Any:
    """Accept AC-SGD's names; settings given explicitly take precedence over what a name implies."""
    if not isinstance(value, Mapping):
        return value
    aliases: dict[Any, dict[str, Any]] = {
        "fixpoint": {"kind": "direct"},
        "delta": {"kind": "aqsgd"},
        "delta-lowbits": {"kind": "aqsgd", "memory": 8},
    }
    implied = aliases.get(value.get("kind"))
    return value if implied is None else {**implied, **value, "kind": implied["kind"]}


ForwardConfig = Annotated[
    Annotated[
        AqsgdConfig | AutoConfig | DirectConfig | RawConfig | StatelessConfig | TransformConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_known_names),
]
BackwardConfig = Annotated[
    Annotated[
        GradientAqsgdConfig | DirectConfig | GradientTransformConfig | RawConfig | StatelessConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_known_names),
]
Spec = ForwardConfig | BackwardConfig


class BoundaryConfig(BaseModel):
    """How a cut is compressed. Without `cut` it applies to every cut that has no table of its own.

    The names of AC-SGD are accepted too: `kind = "fixpoint"` is "direct", "delta" is "aqsgd" and
    "delta-lowbits" is "aqsgd" with `memory = 8`.
    """

    model_config = _STRICT

    cut: int | None = None
    forward: ForwardConfig = AqsgdConfig()
    backward: BackwardConfig = DirectConfig()
    guard: GuardConfig = GuardConfig()


def _as_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise ValueError(f"name = {name!r}: use letters, digits, - and _, and . inside")
    return name


class RunSection(BaseModel):
    """Name, folder and seed of a run."""

    model_config = _STRICT

    name: Annotated[str, AfterValidator(_as_folder)] = "run"
    folder: str | None = None
    seed: int = Field(0, ge=0, lt=2**31)

    @property
    def path(self) -> Path:
        """Run folder, by default runs/<name>."""
        return Path(self.folder or f"runs/{self.name}").expanduser().resolve()


_Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(BaseModel):
    """AdamW with linear warm-up, then decay to zero.

    `optimizer = "muon"` is Muon for the matrices of hidden layers and AdamW for the rest;
    "module:function" is one's own, called as `function(named_parameters, lr=...)`.

    `batch_size` is over all replicas; `clip_norm` limits the global gradient norm, 0 turns it off.
    Every `verify_every` steps ranks compare digests of what they should hold alike; 0: never.
    So many skipped steps in a row as `max_skipped` (loss or gradients not finite) end the run.
    """

    model_config = _STRICT

    epochs: int = Field(3, ge=1, le=10**9)
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


class EvalConfig(BaseModel):
    """Evaluate on held-out data every `every_epochs` epochs, and after the last."""

    model_config = _STRICT

    every_epochs: int = Field(1, ge=1)


class CheckpointConfig(BaseModel):
    """Save every `every_epochs` epochs (or `every_steps` steps) and at the end; keep the newest.

    With `copies = 2` each part is kept on a second machine too, so that a lost disk loses nothing.
    On SIGTERM and at the first Ctrl-C a run saves and ends, within `grace_s` seconds.
    """

    model_config = _STRICT

    every_epochs: int = Field(1, ge=1)
    every_steps: int | None = Field(None, ge=1)
    keep: int = Field(2, ge=1)
    copies: int = Field(1, ge=1)
    grace_s: float = Field(20.0, ge=1, le=25)


class RunConfig(BaseModel):
    """Everything about a run. `gradcomp` holds `method` and one table of options per method."""

    model_config = _STRICT

    run: RunSection = RunSection()
    model: ModelSection = TransformerConfig()
    data: DataConfig = DataConfig()
    pipeline: PipelineConfig = PipelineConfig()
    boundary: tuple[BoundaryConfig, ...] = ()
    memory: MemoryConfig = MemoryConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    gradcomp: dict[str, Any] = {"method": "allreduce"}
    shards: ShardsConfig = ShardsConfig()
    network: NetworkConfig = NetworkConfig()

    @property
    def world_size(self) -> int:
        """Processes the run needs."""
        return self.pipeline.pipeline_ranks * self.pipeline.lanes

    def mesh(self, rank: int) -> Mesh:
        """Where a rank stands."""
        pipeline = self.pipeline
        return Mesh(pipeline.pipeline_ranks, pipeline.replicas, rank, pipeline.shards)

    @property
    def method(self) -> str:
        """How replicas exchange: the name of a file in gradcomp/methods."""
        return str(self.gradcomp.get("method", "allreduce"))

    @property
    def method_options(self) -> BaseModel:
        """Options of that method."""
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
        model = self.model
        if not isinstance(model, OwnModelConfig):
            return self.data.sequence_length, model.width
        return model.usual_shape or (1, 1)  # a model that cannot be cut sends nothing

    def check_model_cuts(self) -> None:
        """Check that a model of one's own can be cut where the cuts are.

        Raises:
            ValueError: it cannot; names layer and shape.
        """
        if isinstance(self.model, OwnModelConfig) and not self.pipeline.auto_cuts:
            self.model.check_cuts(self.pipeline.cuts)

    def boundary_at(self, cut: int) -> BoundaryConfig:
        """The boundary of a cut; in a single epoch "auto" is stateless."""
        found = boundary_at(self.boundary, cut)
        if isinstance(found.forward, AutoConfig) and self.train.epochs == 1:
            return found.model_copy(update={"forward": found.forward.without_memory()})
        return found

    @property
    def specs(self) -> dict[tuple[int, Direction], Spec]:
        """How each direction of each cut is compressed."""
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

    def notices(self) -> list[str]:
        """Notes and warnings to print before the run starts."""
        found = []
        if isinstance(self.model, HuggingFaceConfig):
            found += self.model.notices(cut=bool(self.pipeline.cuts))
            if self.model.weights is not None and self.data.tokenizer == BYTES:
                found.append(
                    'warning: data.tokenizer = "bytes" with a pretrained model: its ids mean other '
                    "things; set data.tokenizer to the folder of its tokenizer"
                )
        if self.pipeline.cuts and could_be_tied(self.model) and _keeps_ties(self):
            assert not isinstance(self.model, OwnModelConfig), "ties nothing"
            megabytes = 4 * self.model.vocab * self.model.width / 1e6
            found.append(
                "note: a cut separates embedding and head, so they are separate weights; "
                'model.tie_embeddings = "exact" keeps them equal for '
                f"{megabytes:.3g} MB more each way per step"
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
        delta = any(spec.kind in ("aqsgd", "transform") for spec in self.specs.values())
        if delta and self.train.epochs == 1:
            found.append(
                "note: AQ-SGD sends changes between epochs, and train.epochs = 1: every sample is "
                'sent as a first visit; kind = "stateless" is smaller for the same error, and '
                'kind = "auto" chooses it by itself'
            )
        dropout = fresh_dropout(self.model)
        if delta and dropout:
            repeat = 'model.dropout_masks = "repeated" or dropout'
            found.append(
                f"warning: model.dropout = {dropout} with AQ-SGD: dropout masks differ "
                "at every visit, so the change of an activation is about 0.6 of its size (0.1-0.2 "
                "without dropout) and most of the gain is lost; set "
                f"{'model.dropout' if isinstance(self.model, HuggingFaceConfig) else repeat} to 0, "
                "or use direct boundaries"
            )
        return found

    def shared(self) -> dict[str, Any]:
        """Settings that must be equal on all hosts, JSON-able: all but paths and memory limits."""
        shared = self.model_dump(mode="json", exclude=_LOCAL)
        if isinstance(self.model, HuggingFaceConfig):
            shared["model"]["folder"] = self.model.digest()
        if isinstance(self.model, OwnModelConfig):
            shared["model"]["structure"] = self.model.digest
        return shared

    def digest(self) -> str:
        """SHA-256 of `shared`."""
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _name_the_tokenizer(cls, tree: Any) -> Any:
        """`data.tokenizer = "model"` is the model's folder."""
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
        folder = HuggingFaceConfig.model_validate(model).folder
        return {**tree, "data": {**tree["data"], "tokenizer": str(folder)}}

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        _check_cuts(self.pipeline, self.model.layers)
        self.check_model_cuts()
        check_schedule(
            self.pipeline.schedule,
            stages=self.pipeline.stages,
            ranks=self.pipeline.pipeline_ranks,
            microbatches=self.pipeline.microbatches,
        )
        check_devices(self.pipeline, self.model)
        check_placement(self.pipeline)
        check_shards(self.pipeline, self.model, self.train.optimizer)
        _check_boundaries(self.boundary, self.pipeline)
        _check_sizes(self)
        _check_task(self)
        _check_gradcomp(self.gradcomp)
        _check_tie(self)
        return self


def boundary_at(boundaries: Sequence[BoundaryConfig], cut: int) -> BoundaryConfig:
    """The boundary of a cut: its own table, else the one without `cut`, else the default."""
    own = [boundary for boundary in boundaries if boundary.cut == cut]
    general = [boundary for boundary in boundaries if boundary.cut is None]
    return (own + general + [BoundaryConfig()])[0]


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and the files it extends, apply `a.b=c` overrides, check everything.

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
    return load_as(RunConfig, path, overrides, aliases=aliases)


def write_config(config: RunConfig, path: Path) -> None:
    """Write the resolved config as TOML; reading it back gives an equal one."""
    fields = config.model_dump(mode="json", exclude_none=True)
    path.write_text(tomlkit.dumps(fields))


def _check_cuts(pipeline: PipelineConfig, layers: int) -> None:
    cuts = pipeline.cuts
    if pipeline.auto_cuts and pipeline.stages > layers:
        raise ValueError(
            f"pipeline.stages = {pipeline.stages}: the model has {layers} layers, and every stage "
            f"needs one; use at most {layers}, or raise model.layers"
        )
    if len(cuts) + 1 > layers:
        raise ValueError(
            f"pipeline.cuts = {list(cuts)}: {len(cuts) + 1} stages for {layers} layers; "
            "every stage needs a layer: use fewer cuts or raise model.layers"
        )
    for cut in cuts:
        if not 0 < cut < layers:
            raise ValueError(
                f"pipeline.cuts = {list(cuts)}: {cut} is not between two of the {layers} "
                f"layers; use values from 1 to {layers - 1}"
            )
    if sorted(set(cuts)) != list(cuts):
        raise ValueError(
            f"pipeline.cuts = {list(cuts)}: not in ascending order; write {sorted(set(cuts))}"
        )


def _check_boundaries(boundaries: Sequence[BoundaryConfig], pipeline: PipelineConfig) -> None:
    named, cuts = [boundary.cut for boundary in boundaries], pipeline.cuts
    for cut in named:
        if cut is not None and pipeline.auto_cuts:
            raise ValueError(
                f'boundary.cut = {cut}: with pipeline.cuts = "auto" cuts are not known yet; remove '
                "cut, or list the cuts"
            )
        if cut is not None and cut not in cuts:
            raise ValueError(f"boundary.cut = {cut}: no such cut; pipeline.cuts = {list(cuts)}")
        if named.count(cut) > 1:
            which = "without a cut" if cut is None else f"for cut {cut}"
            raise ValueError(f"boundary: two tables {which}; merge them")


def _check_sizes(config: RunConfig) -> None:
    data, model, train = config.data, config.model, config.train
    if not isinstance(model, OwnModelConfig) and data.factory is None:
        _check_tokens(data, model)
    pipeline = config.pipeline
    parts = pipeline.lanes * train.accumulate
    if train.batch_size % parts:
        sharded = f" x {pipeline.shards} shards" if pipeline.shards > 1 else ""
        raise ValueError(
            f"train.batch_size = {train.batch_size} cannot be shared evenly by "
            f"{pipeline.replicas} replicas{sharded} in {train.accumulate} accumulation parts; "
            f"use a multiple of {parts}"
        )


def _check_tokens(data: DataConfig, model: TransformerConfig | HuggingFaceConfig) -> None:
    if data.sequence_length > model.context:
        raise ValueError(
            f"data.sequence_length = {data.sequence_length} is longer than "
            f"model.context = {model.context}; raise the context or shorten the sequences"
        )
    if data.tokenizer == "bytes" and model.vocab < 256:
        raise ValueError(f"model.vocab = {model.vocab}: bytes need 256")


def _check_task(config: RunConfig) -> None:
    data, model = config.data, config.model
    labelled = data.kind == "labelled"
    if data.factory is None and (model.task == "classification") != labelled:
        raise ValueError(
            f'model.task = "{model.task}", data.label_field = {data.label_field!r}: '
            "classification needs labels and language modelling has none; set both or neither"
        )
    masked = data.packing or data.objective == "prefix"
    if isinstance(model, HuggingFaceConfig) and data.kind == "instructions" and masked:
        try:
            check_masks(model.transformers_config, data.sequence_length)
        except ValueError as error:
            raise ValueError(
                f"data.packing = {str(data.packing).lower()}, "
                f'data.objective = "{data.objective}": {error}'
            ) from None
    if data.labels is not None and len(data.labels) != model.classes:
        raise ValueError(
            f"data.labels = {list(data.labels)}: {len(data.labels)} names for model.classes = "
            f"{model.classes}; make the numbers equal"
        )


def _check_tie(config: RunConfig) -> None:
    """Tied copies stay equal only if all replicas apply equal gradients."""
    model, ranks = config.model, config.stage_ranks
    copies = ranks[0] != ranks[config.pipeline.stages - 1] and not is_frozen(model)
    if copies and model.tie_embeddings == "exact" and not _keeps_ties(config):
        raise ValueError(
            f'model.tie_embeddings = "exact" with gradcomp.method = "{config.method}", which lets '
            'replicas differ: the tied copies would drift; use tie_embeddings = "untied" or a '
            "method that exchanges gradients"
        )


def _keeps_ties(config: RunConfig) -> bool:
    return config.pipeline.replicas == 1 or load_method(config.method).REPLICAS_EQUAL


def _check_gradcomp(table: Mapping[str, Any]) -> None:
    method = str(table.get("method", "allreduce"))
    load_method(method)
    for key, value in table.items():
        if key == "method":
            continue
        if key not in method_names():
            near = difflib.get_close_matches(key, ["method", *method_names()], n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ValueError(f"gradcomp.{key}: no such method{hint}")
        try:
            parse_options(key, value)
        except ValidationError as error:
            lines = explain(error, load_method(key).Config, "gradcomp", key)
            raise ValueError("; ".join(lines)) from None

"""Settings of a Hugging Face model, and its shape, from the config.json of its folder."""

import copy
import hashlib
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field, field_validator, model_validator
from torch import Tensor, nn

from thinpipe.pipeline.models.kind import Checkpointing, Problem, TokenModel
from thinpipe.pipeline.models.paths import user_path
from thinpipe.pipeline.precision import WeightFormat

if TYPE_CHECKING:
    from thinpipe.pipeline.batch import Batch
    from thinpipe.pipeline.models.hf.families import Family
    from thinpipe.pipeline.models.hf.shards import Shards
    from thinpipe.pipeline.models.hf.stage import HuggingFaceStage

# Their positions count from padding_idx + 1.
_ROBERTA_LIKE = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    "xlm-roberta-xl",
)
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length")
_HEADS = ("summary_", "classifier_", "pooler_")  # rates of task heads


class LoraConfig(BaseModel, frozen=True, extra="forbid"):
    """Train low-rank additions to some linear layers; everything else is frozen.

    `targets` are names of modules, by default peft's for the family. The addition is scaled by
    `alpha / rank`.
    """

    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=16, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)


class HuggingFaceConfig(TokenModel):
    """A model of the transformers library, from a folder on disk.

    `pretrained` is a folder with config.json and safetensors weights; `config` one of which only
    config.json is read, for random weights; it takes precedence over `pretrained`. `task =
    "classification"` puts a head of `classes` outputs on an encoder: one class per text, several
    labels or numbers, by `problem_type` (of one output "regression", else
    "single_label_classification"). `dropout` replaces every dropout rate of the folder's config.
    With `tie_embeddings = "exact"` a tied head stays equal to the embedding when a cut separates
    them; "untied" lets the copies diverge. `weights` is in what matrices are held: LoRA's frozen
    ones by default in "bf16" with `pipeline.precision = "bf16"` and one shard, all else in "fp32";
    "bf16" without LoRA trains linear layers in bf16. With `self_check` one step of the cut model is
    compared with that of the whole one before training, and packed examples with single ones.
    `from_run` is the folder of a run whose weights this one starts from.
    """

    tag: ClassVar = "folder"
    caches_keys: ClassVar[bool] = True

    pretrained: str | None = None
    config: str | None = None
    task: Literal["language", "classification"] = "language"
    classes: int | None = Field(default=None, ge=1)
    problem_type: Problem | None = None
    dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    activation_checkpointing: Checkpointing = False
    tie_embeddings: Literal["untied", "exact"] = "untied"
    lora: LoraConfig | None = None
    weights: WeightFormat | None = None
    self_check: bool = False
    from_run: str | None = None

    @field_validator("pretrained", "config")
    @classmethod
    def _absolute(cls, folder: str | None) -> str | None:
        return folder and str(user_path(folder).resolve())

    @model_validator(mode="after")
    def _check(self) -> "HuggingFaceConfig":
        if not (self.config or self.pretrained):
            raise ValueError("pretrained or config: name the model's folder")
        self._check_folder()
        from thinpipe.pipeline.models.hf.families import check_router, task_of

        config = self.transformers_config
        try:
            needed = task_of(config)
            check_router(config)
        except ValueError as error:
            raise ValueError(f"{self.folder / 'config.json'}: {error}") from None
        if self.task != needed:
            raise ValueError(
                f"task = {self.task!r}: {config.model_type} is made for task = {needed!r}; use it"
            )
        if (self.task == "classification") != (self.classes is not None):
            raise ValueError(
                f"task = {self.task!r}, classes = {self.classes}: a classification head, and no "
                "other, needs a number of classes"
            )
        self._check_problem()
        self._check_weights()
        if self.tie_embeddings == "exact" and not self.ties_embeddings:
            own = f" ({', '.join(self.own_heads)} of its files differs)" if self.own_heads else ""
            raise ValueError(
                'tie_embeddings = "exact": the head of this model is no copy of its embedding'
                f"{own}; leave it out"
            )
        return self

    def _check_weights(self) -> None:
        if self.quantizes and self.weight_files is None:
            raise ValueError(
                f'weights = "{self.weights}": quantizes what files hold, and model.config gives '
                'random weights; name a folder with weights in pretrained, or use "bf16"'
            )
        if self.quantizes and self.lora is None:
            raise ValueError(
                f'weights = "{self.weights}": is for frozen weights, and without lora all are '
                'trained; add lora = { rank = 8 }, or use "bf16"'
            )

    def _check_problem(self) -> None:
        if self.classes is None and self.problem_type is not None:
            raise ValueError(
                f"problem_type = {self.problem_type!r}: belongs to a classification head; leave it "
                "out"
            )
        if self.classes == 1 and self.problem == "single_label_classification":
            raise ValueError(
                "classes = 1: one class tells nothing apart; use 2 for yes or no, or problem_type "
                '= "regression"'
            )
        asked = _read(self.folder).problem_type if self.classes else None
        if asked not in (None, self.problem) and self.problem_type is None:
            raise ValueError(
                f"classes = {self.classes}: trains for problem_type = {self.problem!r}, and "
                f"config.json says {asked!r}; set problem_type to one of them"
            )

    @property
    def problem(self) -> Problem:
        return self.problem_type or ("regression" if self.classes == 1 else super().problem)

    @property
    def token_types(self) -> int:
        return max(1, int(getattr(self.transformers_config, "type_vocab_size", None) or 1))

    @property
    def folder(self) -> Path:
        return Path(self.config or self.pretrained or "")

    @property
    def weight_files(self) -> "Shards | None":
        """Weights to start from; None for random ones."""
        from thinpipe.pipeline.models.hf.shards import Shards

        return Shards(Path(self.pretrained)) if self.pretrained and not self.config else None

    @property
    def layers(self) -> int:
        return int(self.transformers_config.num_hidden_layers)

    @property
    def width(self) -> int:
        return int(self.transformers_config.hidden_size)

    @property
    def vocab(self) -> int:
        return int(self.transformers_config.vocab_size)

    @property
    def context(self) -> int:
        config = self.transformers_config
        unused = config.pad_token_id + 1 if config.model_type in _ROBERTA_LIKE else 0
        longest = next((getattr(config, n) for n in _CONTEXTS if hasattr(config, n)), None)
        return sys.maxsize if longest is None else int(longest) - unused  # none: no positions

    @property
    def longest(self) -> str:
        return (
            f"the {self.context} tokens that the model was made for (its config.json); use at most "
            f"{self.context}"
        )

    @property
    def ties_embeddings(self) -> bool:
        return self._says_tied and not self.own_heads

    @property
    def _says_tied(self) -> bool:
        return self.task == "language" and bool(self.transformers_config.tie_word_embeddings)

    @cached_property
    def own_heads(self) -> list[str]:
        """Heads of the files that differ from the embedding, though config.json ties them."""
        from thinpipe.pipeline.models.hf.weights import differing_copies

        if not self._says_tied or self.weight_files is None:
            return []
        return differing_copies(self.weight_files, self._on_meta(untie=False))

    @property
    def tied_names(self) -> Mapping[str, str]:
        from thinpipe.pipeline.models.hf.weights import tied_names

        found = tied_names(self.whole()) if self.ties_embeddings else {}
        return {f"model.{name}": f"model.{source}" for name, source in found.items()}

    @property
    def fresh_dropout(self) -> float:
        config = self.transformers_config
        names = [name for name in _dropout_names(config) if not name.startswith(_HEADS)]
        return max((float(getattr(config, name) or 0.0) for name in names), default=0.0)

    @property
    def trains_in_bf16(self) -> bool:
        return self.weights == "bf16" and self.lora is None

    @property
    def quantizes(self) -> bool:
        return self.weights in ("nf4", "int8")

    @property
    def is_frozen(self) -> bool:
        return self.lora is not None  # as all is that LoRA does not add

    @property
    def reads_frozen(self) -> bool:
        return self.lora is not None and self.weight_files is not None

    @property
    def libraries(self) -> int:
        return 1 + self.quantizes

    @property
    def could_be_tied(self) -> bool:
        return self.ties_embeddings and not self.is_frozen and self.tie_embeddings == "untied"

    @property
    def ties_uncut(self) -> bool:
        return self.ties_embeddings

    @property
    def frozen_parts(self) -> Sequence[str]:
        return self.family.shared

    def build(
        self, first: int, stop: int, *, seed: int, device: torch.device | str
    ) -> "HuggingFaceStage":
        from thinpipe.pipeline.models.hf.stage import build_stage

        return build_stage(self, first, stop, seed=seed, device=device)

    def held_nbytes(self, stage: nn.Module) -> int:
        from thinpipe.pipeline.models.hf.weight_formats import held_nbytes

        return held_nbytes(stage, self)

    def adapted(self, batch: "Batch") -> "Batch":
        from thinpipe.pipeline.models.hf.inputs import from_arguments

        return from_arguments(batch, predicts_tokens=self.task == "language", context=self.context)

    def check_files(self) -> None:
        from thinpipe.pipeline.models.hf.self_check import check_step
        from thinpipe.pipeline.models.hf.stage import check_folder

        check_folder(self)
        if self.self_check:
            check_step(self.model_copy(update={"weights": None}))

    def check_masks(self, tokens: int) -> None:
        from thinpipe.pipeline.models.hf.masks import check_masks

        check_masks(self.transformers_config, tokens, tried=self.self_check)

    def check_packing(self) -> None:
        from thinpipe.pipeline.models.hf.self_check import check_packed

        if self.self_check:
            check_packed(self.model_copy(update={"weights": None}))

    def facts(self) -> dict[str, str]:
        """SHA-256 of config.json and of the names of the weights."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        if self.weight_files is not None:
            digest.update(self.weight_files.digest().encode())
        return {"folder": digest.hexdigest()}

    def changed_since(self, facts: Mapping[str, str]) -> str | None:
        same = facts.get("folder") == self.facts()["folder"]
        return None if same else f"{self.folder}/config.json or the weights index"

    def whole_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # a stage's own module around the library's
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """LoRA is merged."""
        from thinpipe.pipeline.models.hf.lora import merge_lora, stores_inputs_first

        named = self.whole_names(tensors)
        if self.lora is None:
            return named
        return merge_lora(named, self.lora, inputs_first=stores_inputs_first(self.whole()))

    def module_for(self, state: Mapping[str, Tensor]) -> Any:
        """One of the classes of the library transformers."""
        from thinpipe.pipeline.models.hf.init import initialise
        from thinpipe.pipeline.models.hf.weights import tied_names

        untie = bool(self.own_heads) or any(
            name in state and not torch.equal(state[name], state[source])
            for name, source in tied_names(self.whole()).items()
        )
        whole = self._on_meta(untie=untie).to_empty(device="cpu")
        whole.tie_weights()  # to_empty gave every parameter memory of its own
        initialise(whole, seed=0, tied_to=())  # buffers that no file holds
        return whole

    def notices(self, *, cut: bool, ties: bool, tokenizer: str) -> list[str]:
        found = super().notices(cut=cut, ties=ties, tokenizer=tokenizer)
        if self.pretrained and self.config:
            found.append(
                "note: model.config is set, so weights are random and model.pretrained is not read"
            )
        if self.own_heads:
            found.append(
                f"note: {', '.join(self.own_heads)} in the files of model.pretrained differs from "
                "the embedding, though config.json ties them: both are used, as separate weights"
            )
        if cut and self.family.shared:
            found.append(
                f"note: {', '.join(self.family.shared)} are used by every stage; they are frozen, "
                "so that their copies stay equal"
            )
        if self.weight_files is not None and tokenizer == "bytes":
            found.append(
                'warning: data.tokenizer = "bytes" with a pretrained model: its ids mean other '
                "things; set data.tokenizer to the folder of its tokenizer"
            )
        return found

    @cached_property
    def transformers_config(self) -> Any:
        """The transformers library's config, with the overrides of this one; do not change it.

        Raises:
            ImportError: transformers is not installed.
            ValueError: config.json is not one of a model that the library knows.
        """
        config = _read(self.folder)
        if self.dropout is not None:
            for name in _dropout_names(config):
                setattr(config, name, self.dropout)
        if self.classes is not None:
            config.num_labels = self.classes
            config.problem_type = self.problem
        return config

    @cached_property
    def family(self) -> "Family":
        """How the model is cut: as registered, or found by trying.

        Raises:
            ValueError: it cannot be cut.
        """
        from thinpipe.pipeline.models.hf.discovery import find_family

        with torch.device("cpu"):  # also where a program builds on the meta device
            return find_family(self.whole())

    def whole(self) -> Any:
        """A whole model on the meta device, with a config of its own, which stages change.

        Raises:
            ValueError: the library cannot build it.
        """
        return self._on_meta(untie=bool(self.own_heads))

    def _on_meta(self, *, untie: bool) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        factory: Any = AutoModelForCausalLM
        if self.task == "classification":
            factory = AutoModelForSequenceClassification
        settings = copy.deepcopy(self.transformers_config)
        if untie:
            settings.tie_word_embeddings = False
        with torch.device("meta"):
            return factory.from_config(settings, dtype=torch.float32)

    def _check_folder(self) -> None:
        where = f'{"model.config" if self.config else "model.pretrained"} = "{self.folder}"'
        if self.folder.is_file():
            raise ValueError(f"{where}: a file; name the folder it is in")
        if not self.folder.is_dir():
            raise ValueError(
                f"{where}: no such folder, seen from {Path.cwd()}; correct the path, or run "
                "`hf download NAME --local-dir FOLDER` first and name that folder"
            )
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"{where}: holds no config.json; name a model's folder")
        if self.weight_files is not None:
            _ = self.weight_files.files


def _read(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{folder / 'config.json'}: {first}; copy that of the model again, or update "
            "transformers if the model is newer"
        ) from error


def _dropout_names(config: Any) -> list[str]:
    return [
        name
        for name, rate in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(rate, float | int | None)
    ]

"""A Hugging Face transformer cut between any two blocks, each stage with its own part only.

The whole model is laid out on the meta device; a stage keeps its blocks under their indices in the
whole model, parts that only the ends need are taken out (`discovery.py`), and the family's own
forward runs on what is left. Nothing but hidden states crosses a cut.

Axes: B samples, T tokens, D width, V vocabulary, C classes.
"""

import copy
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.families import Family, keep_blocks, replace_modules
from thinpipe.pipeline.models.hf.init import fill_from_constructors, initialise
from thinpipe.pipeline.models.hf.lora import add_lora, check_targets, plain_name
from thinpipe.pipeline.models.hf.masks import mask_inputs, takes_types
from thinpipe.pipeline.models.hf.weight_formats import SmallWeights, check_quantizable
from thinpipe.pipeline.models.hf.weights import Sources


class HuggingFaceStage(nn.Module):
    """Blocks `first` to `stop - 1` of a model. Parameters carry the names of the whole model."""

    wants_samples = True
    base: Mapping[str, str]
    """Digests of frozen parameters that were read from files, by their names in the state dict;
    a checkpoint leaves them out."""

    def __init__(
        self,
        model: Any,
        config: HuggingFaceConfig,
        first: int,
        stop: int,
        base: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.base = base or {}
        self.model = model
        self._config = config
        self._is_first, self._is_last = first == 0, stop == config.layers
        self._settings = {"return_dict": True}
        if config.task == "language":
            self._settings["use_cache"] = False

    def forward(self, x: Tensor, samples: Samples) -> Tensor:
        """Run the stage on token ids [B, T] (first stage) or hidden states [B, T, D].

        Returns hidden states [B, T, D], or on the last stage logits [B, T, V] or [B, C]; never a
        view, so that schedules may detach the result in place.
        """
        given: dict[str, Any] = {"input_ids" if self._is_first else "inputs_embeds": x}
        if samples.segments_BT is not None or samples.prefix_BT is not None:
            # a family's own mask, of padding alone, would be wrong
            self._config.check_masks(x.shape[1])
            attention = self.model.config._attn_implementation
            given |= mask_inputs(samples, x.shape[1], attention=attention, device=x.device)
        else:
            given["attention_mask"] = samples.mask_BT
        if self._is_first and samples.types_BT is not None and takes_types(self.model):
            given["token_type_ids"] = samples.types_BT.long()
        if self._is_last:
            out: Tensor = self.model(**given, **self._settings).logits
        else:
            out = self.model.base_model(**given, **self._settings).last_hidden_state
        return out.clone() if out._is_view() else out

    def parts(self) -> list[nn.Module]:
        blocks = self.model.base_model.get_submodule(self._config.family.blocks)
        return list(blocks.children())

    def tied_weight(self) -> nn.Parameter | None:
        """The weight of embedding or head that another stage shares; None if none is here."""
        if self._config.tie_embeddings == "untied":
            return None
        if self._is_first:
            weight: nn.Parameter = self.model.get_input_embeddings().weight
            return weight
        return self.model.get_output_embeddings().weight if self._is_last else None

    def share_tied_weight(self, weight: nn.Parameter) -> None:
        self.model.get_output_embeddings().weight = weight


def build_stage(
    config: HuggingFaceConfig, first: int, stop: int, *, seed: int, device: torch.device | str
) -> HuggingFaceStage:
    """Build the stage that holds blocks `first` to `stop - 1`; read or draw only its weights.

    Random values depend on the seed and the module's name, not on the cut; torch's global random
    state is left alone. On the meta device no weights are read.
    """
    family, model = config.family, config.whole()
    blocks = _path_of_blocks(model, family)
    sources = Sources(config.weight_files, model, family) if config.weight_files else None
    tied_to = _embedding(model) if config.ties_embeddings else []
    read: Set[str] = frozenset()
    _cut(model, family, first, stop)
    small = SmallWeights(model, config, blocks)
    if torch.device(device).type != "meta":
        small.to_empty()
        if first == 0 and stop == config.layers:
            model.tie_weights()  # to_empty gave every parameter memory of its own
        if sources is not None:
            read = sources.names(model)
        unset = initialise(model, seed=seed, tied_to=tied_to, read=read) - small.read_later
        if unset:
            copied = copy.deepcopy(config.transformers_config)
            unset = fill_from_constructors(model, blocks, unset, seed=seed, config=copied)
        if sources is not None:
            sources.load(model, small.put)
        _check_set(config, unset)  # files fill the others
    if config.activation_checkpointing:
        _recompute(model, family, [config.recomputes(block) for block in range(first, stop)])
    base = {}
    if config.lora is not None:
        add_lora(model, config.lora, seed=seed)
        base = {
            f"model.{name}": small.digests[plain_name(name)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and plain_name(name) in read
        }
    # last, so that random values are the CPU's
    return HuggingFaceStage(model.to(device), config, first, stop, base)


def check_folder(config: HuggingFaceConfig) -> None:
    """Check that the model can be cut and that its weights are all there; reads only headers."""
    model, family = config.whole(), config.family
    if config.weight_files is not None:
        Sources(config.weight_files, model, family).check()
    if config.quantizes:
        check_quantizable(model, config, _path_of_blocks(model, family))
    if config.lora is not None:
        check_targets(model, config.lora)
        add_lora(model, config.lora, seed=0)


def _check_set(config: HuggingFaceConfig, unset: Set[str]) -> None:
    if unset:
        shown = ", ".join(sorted(unset)[:4]) + (", ..." if len(unset) > 4 else "")
        raise ValueError(
            f"model_type = {config.transformers_config.model_type!r}: neither the library's "
            f"initialisation nor a constructor sets {shown}; train from weights "
            "(model.pretrained), or a model of another family"
        )


def _cut(model: Any, family: Family, first: int, stop: int) -> None:
    base = model.base_model
    whole = len(base.get_submodule(family.blocks))
    keep_blocks(base, family, first, stop)
    if stop - first < whole:
        for name, parameter in base.named_parameters():
            if name.startswith(tuple(f"{path}." for path in family.shared)):
                parameter.requires_grad_(False)  # else the copies would diverge
    if first > 0:
        replace_modules(base, family.first)
    if stop < whole:
        replace_modules(base, family.last)
        for name, _ in list(model.named_children()):  # heads: everything but the base model
            if name != model.base_model_prefix:
                setattr(model, name, nn.Identity())


def _path_of_blocks(model: Any, family: Family) -> str:
    has_prefix = model.base_model is not model
    return f"{model.base_model_prefix}.{family.blocks}" if has_prefix else family.blocks


def _recompute(model: Any, family: Family, blocks: Sequence[bool]) -> None:
    # the second name is that of older releases
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for block, again in zip(model.base_model.get_submodule(family.blocks), blocks, strict=True):
        if not again and not hasattr(block, "gradient_checkpointing"):
            raise ValueError(
                f"model.activation_checkpointing: {type(block).__name__} has no switch of its own, "
                "so that all blocks are computed again or none; use true or false"
            )
        block.gradient_checkpointing = again


def _embedding(model: Any) -> list[tuple[str, nn.Module]]:
    """Name and module of the embedding, and of the modules around it up to the base model."""
    embedding = model.get_input_embeddings()
    path = next(n for n, module in model.named_modules() if module is embedding)
    found = [(path, embedding)]
    while path := path.rpartition(".")[0]:
        module = model.get_submodule(path)
        if not hasattr(module, "_init_weights"):
            found.append((path, module))
    return found

"""Transformer in the manner of GPT-2 that can be cut between any two blocks.

A decoder with a language-model head, or an encoder with a classification head.

Axes: B samples, T tokens, D width, V vocabulary, C classes, H heads.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.attention import attention_mask, positions
from thinpipe.pipeline.models.dropout import Dropout, DropoutMasks, DropoutSite
from thinpipe.pipeline.models.kind import Checkpointing, TokenModel

_INIT_STD = 0.02  # as GPT-2
_EMBEDDING_NAME = "token_embedding.weight"
_HEAD_NAME = "head.weight"


class TransformerConfig(TokenModel):
    """Shape of the whole model, the same on every stage.

    `context` is the longest sequence in tokens. `activation_checkpointing` keeps only the inputs of
    blocks and computes them again during backward; 2 does so in every second block, n in every nth,
    counted through all stages. With `tie_embeddings = "exact"` the embedding
    and the head are one weight; when a cut separates them, the engine must add up the gradients of
    the two copies. `task = "classification"` makes an encoder: attention in both directions, and
    one of `classes` labels from the mean over a sample's tokens.
    `dropout_masks = "repeated"` drops the same elements of a sample at every visit. `from_run` is
    the folder of a run whose weights this one starts from.
    """

    tag: ClassVar = "shape"

    layers: int = Field(default=8, ge=1)
    width: int = Field(default=128, ge=1)
    heads: int = Field(default=4, ge=1)
    vocab: int = Field(default=256, ge=1)
    context: int = Field(default=128, ge=1)
    task: Literal["language", "classification"] = "language"
    classes: int | None = Field(default=None, ge=2)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    dropout_masks: DropoutMasks = "random"
    activation_checkpointing: Checkpointing = False
    tie_embeddings: Literal["untied", "exact"] = "untied"
    from_run: str | None = None

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "TransformerConfig":
        if self.width % self.heads:
            nearest = max(1, round(self.width / self.heads)) * self.heads
            raise ValueError(
                f"width = {self.width}, heads = {self.heads}: the width must be a multiple of the "
                f"number of heads; use width = {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _head_fits_task(self) -> "TransformerConfig":
        classifies = self.task == "classification"
        if classifies and self.classes is None:
            raise ValueError(
                'task = "classification": the number of labels is missing; set classes'
            )
        if classifies and self.tie_embeddings == "exact":
            raise ValueError(
                'tie_embeddings = "exact": a classification head has no row per token; use "untied"'
            )
        if not classifies and self.classes is not None:
            raise ValueError(
                f"classes = {self.classes}: a language model has no classes; leave it out or set "
                'task = "classification"'
            )
        return self

    def build(
        self, first: int, stop: int, *, seed: int, device: torch.device | str
    ) -> "TransformerStage":
        return build_layers(self, first, stop, seed=seed, device=device)

    @property
    def longest(self) -> str:
        return f"model.context = {self.context}; raise the context or shorten the sequences"

    @property
    def fresh_dropout(self) -> float:
        return self.dropout if self.dropout_masks == "random" else 0.0

    @property
    def repeat_dropout(self) -> str:
        return 'set model.dropout_masks = "repeated" or dropout to 0'

    @property
    def could_be_tied(self) -> bool:
        return self.task == "language" and self.tie_embeddings == "untied"

    @property
    def tied_names(self) -> Mapping[str, str]:
        return {_HEAD_NAME: _EMBEDDING_NAME} if self.task == "language" else {}


@dataclass(frozen=True)
class _SampleInfo:
    ids_B: Tensor | None
    mask_B1TT: Tensor | None


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int, *, seed: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.causal = config.task == "language"
        self.dropout = _dropout(config, layer, "attention", seed=seed)
        self.out_dropout = _dropout(config, layer, "mixed", seed=seed)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor, info: _SampleInfo) -> Tensor:
        samples, tokens, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.dropout.repeats:
            attended = self._attend(query, key, value, info=info)
        else:
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=info.mask_B1TT,
                dropout_p=self.dropout.rate if self.training else 0.0,
                is_causal=self.causal and info.mask_B1TT is None,
            )
        out_BTD = self.out(attended.transpose(1, 2).reshape(samples, tokens, width))
        dropped_BTD: Tensor = self.out_dropout(out_BTD, info.ids_B)
        return dropped_BTD

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, info: _SampleInfo) -> Tensor:
        """Attention step by step: the fused kernel draws its own dropout masks."""
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        mask = info.mask_B1TT
        if mask is None and self.causal:
            mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        probabilities: Tensor = self.dropout(scores.softmax(-1, dtype=torch.float32), info.ids_B)
        return probabilities.to(value.dtype) @ value


class _FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int, *, seed: int) -> None:
        super().__init__()
        self.dropout = _dropout(config, layer, "feed_forward", seed=seed)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor, info: _SampleInfo) -> Tensor:
        out_BTD: Tensor = self.dropout(self.out(F.gelu(self.up(x_BTD))), info.ids_B)
        return out_BTD


class _Block(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int, *, seed: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = _Attention(config, layer, seed=seed)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = _FeedForward(config, layer, seed=seed)

    def forward(self, x_BTD: Tensor, info: _SampleInfo) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), info)
        out_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD), info)
        return out_BTD


class TransformerStage(nn.Module):
    """Blocks `first` to `stop - 1`, with the embedding before block 0 and the head after the last.

    Parameters carry the names they have in the whole model. Made by `build_layers`; `seed` is that
    of repeated dropout masks.
    """

    wants_samples = True

    def __init__(self, config: TransformerConfig, first: int, stop: int, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.token_embedding: nn.Embedding | None = None
        self.position_embedding: nn.Embedding | None = None
        self.final_norm: nn.LayerNorm | None = None
        self.head: nn.Linear | None = None
        self.classifier: nn.Linear | None = None
        self.embedding_dropout = _dropout(config, 0, "embedding", seed=seed)
        if first == 0:
            self.token_embedding = nn.Embedding(config.vocab, config.width)
            self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleDict(
            {str(layer): _Block(config, layer, seed=seed) for layer in range(first, stop)}
        )
        if stop == config.layers:
            self.final_norm = nn.LayerNorm(config.width)
            if config.classes is None:
                self.head = nn.Linear(config.width, config.vocab, bias=False)
            else:
                self.classifier = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor, samples: Samples | None = None) -> Tensor:
        """Run the stage on token ids [B, T] (int64, first stage) or hidden states [B, T, D].

        Returns hidden states [B, T, D], or on the last stage logits, [B, T, V] or [B, C]; never a
        view, so that schedules may detach the result in place. Without `samples` there is no
        padding, and one example per sequence.

        Raises:
            ValueError: the sequence is longer than the context; repeated dropout masks without
                `samples`.
        """
        tokens = x.shape[1]
        if tokens > self.config.context:
            raise ValueError(
                f"sequence of {tokens} tokens: the model's context = {self.config.context}; "
                f"shorten the sequences or set context to at least {tokens}"
            )
        x_BTD = self._embed(x, samples)
        causal = self.config.task == "language"
        ids_B = None if samples is None else samples.ids_B
        info = _SampleInfo(ids_B, attention_mask(samples, tokens, causal=causal, device=x.device))
        for index, block in self.blocks.items():
            if self.config.recomputes(int(index)) and torch.is_grad_enabled():
                draws = self.config.dropout > 0
                x_BTD = checkpoint(
                    block, x_BTD, info, use_reentrant=False, preserve_rng_state=draws
                )
            else:
                x_BTD = block(x_BTD, info)
        return x_BTD if self.final_norm is None else self._logits(self.final_norm(x_BTD), samples)

    def parts(self) -> list[nn.Module]:
        """Modules that run one after the other, and need their weights only then."""
        return list(self.blocks.values())

    def tied_weight(self) -> nn.Parameter | None:
        """The weight of embedding or head that another stage shares; None if none is here."""
        if self.config.tie_embeddings == "untied":
            return None
        layer = self.token_embedding or self.head
        return None if layer is None else layer.get_parameter("weight")

    def share_tied_weight(self, weight: nn.Parameter) -> None:
        assert self.head is not None, "the last stage has a head"
        self.head.weight = weight

    def _embed(self, x: Tensor, samples: Samples | None) -> Tensor:
        if self.token_embedding is None or self.position_embedding is None:
            return x
        positions_BT = positions(samples, x.shape[1], device=x.device)
        x_BTD = self.token_embedding(x) + self.position_embedding(positions_BT)
        ids_B = None if samples is None else samples.ids_B
        dropped_BTD: Tensor = self.embedding_dropout(x_BTD, ids_B)
        return dropped_BTD

    def _logits(self, x_BTD: Tensor, samples: Samples | None) -> Tensor:
        """[B, T, V] or [B, C]."""
        head = self.head or self.classifier
        assert head is not None, "the last stage has one"
        logits: Tensor = head(x_BTD if self.classifier is None else _mean(x_BTD, samples))
        return logits


def _mean(x_BTD: Tensor, samples: Samples | None) -> Tensor:
    """Of a sample's tokens without padding, [B, D]."""
    if samples is None or samples.mask_BT is None:
        return x_BTD.mean(1)
    real_BT1 = (samples.mask_BT != 0).to(x_BTD)[:, :, None]
    return (x_BTD * real_BT1).sum(1) / real_BT1.sum(1).clamp(min=1)


def _dropout(config: TransformerConfig, layer: int, site: DropoutSite, *, seed: int) -> Dropout:
    return Dropout(config.dropout, config.dropout_masks, seed=seed, layer=layer, site=site)


def build_layers(
    config: TransformerConfig, first: int, stop: int, *, seed: int, device: torch.device | str
) -> TransformerStage:
    """Build and initialise the stage that holds blocks `first` to `stop - 1` (counted from 0).

    Only these layers are allocated. Values depend on the seed and the parameter's name, not on the
    cut or the device; torch's global random state is neither read nor changed.
    """
    from thinpipe.pipeline.models.meta import allocate, on_meta  # settings do without

    with on_meta():  # constructors neither allocate nor draw from the global generator
        stage = TransformerStage(config, first, stop, seed=seed)
    allocate(stage, device)
    tied = config.tie_embeddings == "exact"
    if tied and stage.token_embedding is not None and stage.head is not None:
        stage.head.weight = stage.token_embedding.weight
    for name, parameter in stage.named_parameters():
        source = _EMBEDDING_NAME if tied and name == _HEAD_NAME else name
        _initialise(parameter, source, seed=seed, layers=config.layers)
    return stage


@torch.no_grad()
def _initialise(parameter: nn.Parameter, name: str, *, seed: int, layers: int) -> None:
    if parameter.is_meta:  # whose values nobody can look at, and which may be larger than RAM
        return
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    # Each block adds two branches to the residual stream; scaling keeps its variance in bounds.
    std = _INIT_STD / math.sqrt(2 * layers) if name.endswith(".out.weight") else _INIT_STD
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(values.normal_(std=std, generator=generator))

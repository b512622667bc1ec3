"""Decoder-only transformer in the manner of GPT-2 that can be cut between any two blocks.

Axes: B samples, T tokens, D width, V vocabulary, H heads.
"""

import hashlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_INIT_STD = 0.02
_EMBEDDING_NAME = "token_embedding.weight"
_HEAD_NAME = "head.weight"


class TransformerConfig(BaseModel):
    """Shape of the whole model, the same on every stage.

    `context` is the longest sequence in tokens. `activation_checkpointing` keeps only the inputs of
    blocks and computes them again during backward. With `tie_embeddings = "exact"` the embedding
    and the head are one weight; when a cut separates them, the engine must add up the gradients of
    the two copies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(default=8, ge=1)
    width: int = Field(default=128, ge=1)
    heads: int = Field(default=4, ge=1)
    vocab: int = Field(default=256, ge=1)
    context: int = Field(default=128, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    activation_checkpointing: bool = False
    tie_embeddings: Literal["untied", "exact"] = "untied"

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "TransformerConfig":
        if self.width % self.heads:
            nearest = max(1, round(self.width / self.heads)) * self.heads
            raise ValueError(
                f"width = {self.width}, heads = {self.heads}: the width must be a multiple of the "
                f"number of heads; use width = {nearest}"
            )
        return self


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        samples, tokens, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        out_BTD: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return F.dropout(out_BTD, self.dropout, self.training)


class _FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.out(F.gelu(self.up(x_BTD)))
        return F.dropout(out_BTD, self.dropout, self.training)


class _Block(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = _FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD))
        out_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out_BTD


class TransformerStage(nn.Module):
    """Blocks `first` to `stop - 1`, with the embedding before block 0 and the head after the last.

    Parameters carry the names they have in the whole model. Made by `build_layers`.
    """

    def __init__(self, config: TransformerConfig, first: int, stop: int) -> None:
        super().__init__()
        self.config = config
        self.token_embedding: nn.Embedding | None = None
        self.position_embedding: nn.Embedding | None = None
        self.final_norm: nn.LayerNorm | None = None
        self.head: nn.Linear | None = None
        if first == 0:
            self.token_embedding = nn.Embedding(config.vocab, config.width)
            self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleDict({str(index): _Block(config) for index in range(first, stop)})
        if stop == config.layers:
            self.final_norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids [B, T] (int64, first stage) or hidden states [B, T, D] onwards.

        Returns hidden states [B, T, D], or logits [B, T, V] on the last stage; never a view, so
        that schedules may detach the result in place.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        tokens = x.shape[1]
        if tokens > self.config.context:
            raise ValueError(
                f"sequence of {tokens} tokens: the model's context = {self.config.context}; "
                f"shorten the sequences or set context to at least {tokens}"
            )
        x_BTD = self._embed(x)
        for block in self.blocks.values():
            x_BTD = self._run(block, x_BTD)
        if self.final_norm is None or self.head is None:
            return x_BTD
        logits_BTV: Tensor = self.head(self.final_norm(x_BTD))
        return logits_BTV

    def tied_weight(self) -> nn.Parameter | None:
        """Return the weight this stage shares with another one; None when there is none here.

        When one stage holds both the embedding and the head, this is the parameter of both.
        """
        if self.config.tie_embeddings == "untied":
            return None
        holder = self.token_embedding or self.head
        return None if holder is None else holder.get_parameter("weight")

    def _embed(self, x: Tensor) -> Tensor:
        if self.token_embedding is None or self.position_embedding is None:
            return x
        positions_T = torch.arange(x.shape[1], device=x.device)
        x_BTD = self.token_embedding(x) + self.position_embedding(positions_T)
        return F.dropout(x_BTD, self.config.dropout, self.training)

    def _run(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        if self.config.activation_checkpointing and torch.is_grad_enabled():
            out_BTD: Tensor = checkpoint(
                block, x_BTD, use_reentrant=False, preserve_rng_state=self.config.dropout > 0
            )
        else:
            out_BTD = block(x_BTD)
        return out_BTD


def build_layers(
    config: TransformerConfig, first: int, stop: int, *, seed: int, device: torch.device | str
) -> TransformerStage:
    """Build and initialise the stage that holds blocks `first` to `stop - 1` (counted from 0).

    Only these layers are allocated. Values depend on the seed and the parameter's name, not on the
    cut or the device; torch's global random state is neither read nor moved.

    Raises:
        ValueError: `first` and `stop` are not a non-empty range of the model's layers.
    """
    if not 0 <= first < stop <= config.layers:
        raise ValueError(
            f"first = {first}, stop = {stop}: not a non-empty range of the model's "
            f"{config.layers} layers; use 0 <= first < stop <= {config.layers}"
        )
    # On the meta device constructors neither allocate nor draw from the global generator.
    with torch.device("meta"):
        stage = TransformerStage(config, first, stop)
    stage.to_empty(device=device)
    tied = config.tie_embeddings == "exact"
    if tied and stage.token_embedding is not None and stage.head is not None:
        stage.head.weight = stage.token_embedding.weight
    for name, parameter in stage.named_parameters():
        source = _EMBEDDING_NAME if tied and name == _HEAD_NAME else name
        _initialise(parameter, source, seed=seed, layers=config.layers)
    return stage


@torch.no_grad()
def _initialise(parameter: nn.Parameter, name: str, *, seed: int, layers: int) -> None:
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    # Each block adds two branches to the residual stream; scaling keeps its variance in bounds.
    std = _INIT_STD / math.sqrt(2 * layers) if name.endswith(".out.weight") else _INIT_STD
    generator = torch.Generator().manual_seed(_seed_of(seed, name))
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(values.normal_(std=std, generator=generator))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")

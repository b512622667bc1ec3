"""A module with a forward of its own: cut, it computes what it does whole, or is rejected."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.pipeline.batch import Batch, Samples
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.example import Example, Functions
from thinpipe.pipeline.models.own.stage import ForwardStage

WIDTH, LAYERS, VOCAB = 16, 6, 50
MASK = torch.ones(4, 9, dtype=torch.int64)
MASK[1, 6:] = 0
IDS = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = Batch({"ids": IDS, "attention": MASK}, (IDS * 7) % VOCAB, torch.arange(4))


class Block(nn.Module):
    """Attention with a mask and a table, and a second value besides hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.kind = "full"

    def forward(self, x: Tensor, mask: Tensor | None, table: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        out = F.scaled_dot_product_attention(q * table, k * table, v, attn_mask=mask)
        return x + out, out.mean()


class Model(nn.Module):
    """Embeddings, scales between blocks, and a head, in places that are no blocks."""

    tied = residual = peeks = sums = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {
                "words": nn.Embedding(VOCAB, WIDTH),
                "blocks": nn.ModuleList(Block() for _ in range(LAYERS)),
            }
        )
        self.places = nn.Parameter(torch.zeros(32, WIDTH))
        self.scales = nn.ParameterList([torch.ones(WIDTH) for _ in range(LAYERS)])
        table = torch.cos(torch.arange(32.0))[:, None] * torch.ones(WIDTH)
        self.register_buffer("table", table, persistent=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if self.tied:
            self.head.weight = self.inner["words"].weight

    def forward(self, ids: Tensor, attention: Tensor | None = None) -> Any:
        tokens = ids.shape[1]
        x = first = self.inner["words"](ids) + self.places[:tokens]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=ids.device).tril()[None]
        if attention is not None:
            mask = mask & attention.bool()[:, None]
        table, total = self.table[:tokens], torch.zeros((), device=ids.device)
        if self.peeks:  # what no graph shows
            table = table * (x.detach().sum(-1, keepdim=True) > 0.5)
        for index, block in enumerate(self.inner["blocks"]):
            assert block.kind == "full"
            x, more = block(x * self.scales[index], mask, table)
            total = total + more if self.sums else total
            x = x + first if self.residual and index == 3 else x
        logits = self.head(self.norm(x))
        return {"logits": logits, "total": total.expand(len(ids))} if self.sums else logits


def own(kind: type[nn.Module] = Model) -> OwnModelConfig:
    config = OwnModelConfig.of(Functions(kind), factory="mine:Model")
    return config.with_example(Example.of(BATCH))


def run(stages: list[Any], batch: Batch) -> dict[str, Tensor]:
    """Outputs and gradients of some stages, one after the other."""
    x, ends = batch.ids_B, []
    samples = Samples(batch.ids_B, given=batch.inputs_BT)
    for index, stage in enumerate(stages):
        start = x.detach().requires_grad_() if index else x
        x = stage(start, samples)
        ends.append((start, x))
    found = {"outputs": x.detach()}
    loss = F.cross_entropy(x.flatten(0, 1), batch.targets.flatten())
    gradient = None
    for start, end in reversed(ends):
        torch.autograd.backward(loss if gradient is None else end, gradient)
        gradient = start.grad
    for stage in stages:
        found |= {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize("cuts", [[1, 3, 5], [2, 4]])
def test_cut_it_computes_what_it_does_whole_bit_for_bit(cuts: list[int]) -> None:
    model = own()
    assert (model.layers, model.usual_shape, model.places) == (6, (9, WIDTH), [1, 2, 3, 4, 5])
    model.check_cuts(cuts)
    plain = Model()
    plain.load_state_dict(model.build(0, LAYERS, seed=3, device="cpu").state_dict())
    stages = [model.build(*ends, seed=3, device="cpu") for ends in pairwise((0, *cuts, LAYERS))]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())
    loss = F.cross_entropy(plain(IDS, MASK).flatten(0, 1), BATCH.targets.flatten())
    loss.backward()
    found = run(stages, BATCH)
    assert torch.equal(found.pop("outputs"), plain(IDS, MASK))
    assert set(found) == set(names)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[name], parameter.grad), name


def test_a_stage_holds_its_own_weights_alone_and_those_that_others_do_not() -> None:
    model = own()
    middle = model.build(2, 4, seed=0, device="meta")
    assert isinstance(middle, ForwardStage)
    assert {name.split(".")[0] for name, _ in middle.named_parameters()} == {"inner", "scales"}
    assert sum(p.numel() for p in middle.parameters()) == 2 * (
        sum(p.numel() for p in Block().parameters()) + WIDTH
    )
    held = model.build(2, 4, seed=0, device="cpu")
    assert held.inner["words"].weight.untyped_storage().nbytes() == 4, "no memory"


def test_batches_of_other_lengths_have_messages_of_theirs() -> None:
    model = own()
    assert model.tokens_of(BATCH.inputs_BT) == 9
    shorter = {"ids": IDS[:, :5], "attention": MASK[:, :5]}
    assert model.tokens_of(shorter) == 5
    stages = [model.build(*ends, seed=0, device="cpu") for ends in ((0, 3), (3, 6))]
    found = run(stages, Batch(shorter, BATCH.targets[:, :5], BATCH.ids_B))
    assert found["outputs"].shape == (4, 5, VOCAB)


@pytest.mark.parametrize(
    ("change", "places", "message"),
    [
        ("tied", [], r"inner.words.weight is used by layers 0 and 5; cut elsewhere"),
        ("residual", [5], r"not at 2: parameter places is used by layers 0 and 4"),
        ("sums", [1], r"not at 2: what follows the blocks uses a second value of block 0"),
        ("peeks", [1, 2, 3, 4, 5], "when cut, block 2 is given other hidden states, masks or pos"),
    ],
)
def test_what_a_cut_would_change_is_rejected_with_the_reason(
    change: str, places: list[int], message: str
) -> None:
    model = own(type("Model", (Model,), {change: True}))
    if change != "sums":
        assert model.places == places
    with pytest.raises(ValueError, match=message):
        model.check_cuts([2])
    if not places:
        with pytest.raises(ValueError, match=r"in 0 places, as parameter inner\.words"):
            model.check_stages(3)


def test_other_forwards_are_rejected_with_the_reason() -> None:
    class Twice(Model):
        def forward(self, ids: Tensor, attention: Tensor | None = None) -> Any:
            x, blocks = self.inner["words"](ids), self.inner["blocks"]
            return blocks[0](blocks[0](x, None, self.table[:9])[0], None, self.table[:9])[0]

    class Looks(Model):
        def forward(self, ids: Tensor, attention: Tensor | None = None) -> Any:
            return self.inner["words"](ids) if int(ids.max()) else ids

    class Some(Model):
        def forward(self, ids: Tensor, attention: Tensor | None = None) -> Any:
            return self.inner["blocks"][0](self.inner["words"](ids), None, self.table[:9])[0]

    for kind, message in (
        (Twice, "its forward calls block 0 after 1 blocks; let it call the blocks of one"),
        (Looks, "its forward fails on the meta device.*let it not look at values"),
        (Some, "its forward calls 1 of the 6 blocks in inner.blocks"),
        (nn.Identity, "Identity has no list of blocks to cut between"),
    ):
        with pytest.raises(ValueError, match=message):
            own(kind).check_cuts([1])

"""Models of one's own: where they can be cut, and what is rejected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.example import Example, Functions
from thinpipe.pipeline.models.own.functions import load_function
from thinpipe.pipeline.models.own.loss import OwnLoss
from thinpipe.pipeline.models.own.stage import OwnStage

TOKENS = Example(*(torch.empty(6, dtype=torch.int64, device="meta") for _ in range(2)))


def own(make: Callable[[], nn.Module], example: Example = TOKENS) -> OwnModelConfig:
    return OwnModelConfig.of(Functions(make), factory="mine:model").with_example(example)


def stack() -> nn.Sequential:
    linear = [nn.Linear(8, 8) for _ in range(3)]
    return nn.Sequential(nn.Embedding(9, 8), *linear, nn.Linear(8, 4), nn.Linear(4, 9))


def test_it_can_be_cut_where_messages_have_the_usual_shape() -> None:
    model = own(stack)
    assert (model.layers, model.usual_shape, model.places) == (6, (6, 8), [1, 2, 3, 4])
    model.check_cuts([1, 4])
    message = r"layer 4 returns .*\[2, 6, 4\].*before layers 1, 2, 3, 4"
    with pytest.raises(ValueError, match=message):
        model.check_cuts([2, 5])


def test_messages_that_are_not_tokens_by_width_are_rejected() -> None:
    pictures = Example(torch.empty(3, 8, 8, device="meta"), TOKENS.target)
    model = own(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), pictures)
    assert model.usual_shape is None
    with pytest.raises(ValueError, match=r"must be floats of shape \[samples, tokens, width\]"):
        model.check_cuts([1])


def test_a_shared_parameter_keeps_cuts_away() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False))
        model[2].weight = model[0].weight
        return model

    message = r"0\.weight and 2\.weight are one parameter.*cut 1.*untie them, or train replicas"
    with pytest.raises(ValueError, match=message):
        own(tied).check_cuts([1])
    assert own(tied).places == []
    with pytest.raises(ValueError, match=r"stages = 2: .* in 0 places only, as 0\.weight and 2\."):
        own(tied).check_stages(2)
    own(tied).check_stages(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), r"Linear has no list of blocks to cut between; put its blocks"),
        (lambda: nn.Sequential(), r"returned an nn.Sequential without layers; give it some"),
    ],
)
def test_other_modules_are_rejected(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = own(make).layers


def test_a_layer_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r'layer 1 \("1", Linear\) fails for an input of shape'):
        _ = own(lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(7, 7))).outputs
    with pytest.raises(ValueError, match=r'layer 1 \("1", LSTM\) returns tuple'):
        _ = own(lambda: nn.Sequential(nn.Embedding(9, 8), nn.LSTM(8, 8))).outputs


def test_stages_together_compute_what_the_model_does() -> None:
    model = own(stack)
    whole = OwnStage(model, 0, 6, seed=1, device="cpu")
    parts = [OwnStage(model, *span, seed=1, device="cpu") for span in ((0, 2), (2, 3), (3, 6))]
    x = y = torch.randint(9, (3, 6))
    for part in parts:
        y = part(y)
    assert torch.equal(whole(x), y)
    names = [name for part in parts for name in part.state_dict()]
    assert names == list(stack().state_dict())
    plain = stack()
    plain.load_state_dict(whole.state_dict())
    assert torch.equal(plain(x), y)


def test_a_stage_never_returns_a_view() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., :4]

    model = own(lambda: nn.Sequential(nn.Embedding(9, 8), Narrow()))
    assert OwnStage(model, 0, 2, seed=0, device="cpu")(torch.zeros(2, 6).long())._base is None


def test_the_number_of_losses_follows_from_the_shape_of_targets_or_a_function() -> None:
    def summed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        rows, labels = outputs.flatten(0, 1), targets.flatten()
        return nn.functional.cross_entropy(rows, labels, reduction="sum"), targets.numel()

    def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return summed(outputs, targets)[0], int((targets != -100).sum())

    loss = OwnLoss(summed, None, torch.empty(2, 6, 9, device="meta"))
    assert loss.count(torch.zeros(4, 6).long()) == 24
    output, targets = torch.empty(2, 3, 9, device="meta"), torch.tensor([[1, -100, 3]])
    with pytest.raises(ValueError, match=r"give the number as a function of its own"):
        OwnLoss(masked, None, output).count(targets)
    assert OwnLoss(masked, lambda t: int((t != -100).sum()), output).count(targets) == 2


def test_losses_of_another_kind_are_rejected() -> None:
    output, targets = torch.zeros(2, 6, 9), torch.zeros(2, 6).long()
    with pytest.raises(ValueError, match=r"return \(sum, number\)"):
        OwnLoss(lambda y, t: y.sum(), None, output).loss_sum(output, targets)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r'a tensor of shape \[2, 6, 9\].*reduction="sum"'):
        OwnLoss(lambda y, t: (y, 3), None, output).loss_sum(output, targets)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("build", r'write it as "module:function"'),
        ("no_such_module:build", r"no module no_such_module, neither installed nor in"),
        ("math:nothing", r"math has no nothing"),
        ("math:pi", r"pi is not a function"),
    ],
)
def test_functions_that_cannot_be_found_are_rejected(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf'model\.factory = "{name}": .*{message}'):
        load_function(name, "model.factory")

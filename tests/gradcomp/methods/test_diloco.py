"""DiLoCo: known answers of its outer step, fragments and overlap."""

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.gradcomp.replicas import Replicas
from thinpipe.gradcomp.methods.diloco import Config

PLAIN = {"interval": 2, "outer_lr": 1.0, "outer_momentum": 0.0}


def start(size: int, **options: Any) -> Replicas:
    return Replicas(size, "diloco", {"bucket_mb": 1e-4, **options})


def end(replicas: Replicas, steps: int) -> list[Tensor]:
    """Parameters after some steps, when all is applied."""
    for _ in range(steps):
        replicas.step()
    replicas.finish()
    return replicas.parameters()


def alone(size: int, steps: int) -> list[Tensor]:
    """Where replicas get without any exchange."""
    replicas = Replicas(size, "none", {})
    for net in replicas.nets:
        for parameter in net.parameters():  # `none` divides no gradient by less
            parameter.requires_grad_(True)
    for _ in range(steps):
        replicas.step()
    return replicas.parameters()


def test_a_plain_outer_step_is_the_mean_of_the_parameters() -> None:
    """With lr 1 and no momentum; every parameter after two local steps is that of `none`."""
    found = end(start(3, **PLAIN), 2)
    expected = torch.stack(alone(3, 2)).mean(0)
    for parameters in found:
        torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(parameters, found[0])


def test_momentum_is_nesterovs() -> None:
    """Against torch's SGD on the mean distance, over three exchanges."""
    replicas = start(2, interval=1, outer_lr=0.7, outer_momentum=0.9)
    replicas.step()
    expected = torch.nn.Parameter(replicas.global_parameters()[0].clone())
    outer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        mean = torch.stack(replicas.parameters()).mean(0)
        expected.grad = expected.detach() - mean
        outer.step()
        replicas.begin()
        for found in replicas.global_parameters():
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
        for net in replicas.nets:
            for parameter in net.parameters():
                parameter.data += 0.01 * parameter.data.sign()


def test_what_a_replica_keeps_of_its_own_is_as_chosen() -> None:
    replicas = start(2, mix=0.25, **PLAIN)
    for _ in range(2):
        replicas.step()
    before = replicas.parameters()
    mean = torch.stack(before).mean(0)
    replicas.begin()
    for old, new in zip(before, replicas.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * mean + 0.25 * old)


def test_fragments_take_turns() -> None:
    replicas = start(2, fragments=2, interval=4, outer_lr=1.0, outer_momentum=0.0)
    sync: Any = replicas.syncs[0]
    moved = []
    for _ in range(9):
        before = [copy.deepcopy([b.global_N for b in part]) for part in sync._fragments]
        replicas.step()
        after = [[b.global_N for b in part] for part in sync._fragments]
        moved.append(
            tuple(
                any(not torch.equal(a, b) for a, b in zip(old, new, strict=True))
                for old, new in zip(before, after, strict=True)
            )
        )
    nothing, first, second = (False, False), (True, False), (False, True)
    pause = [nothing, first, nothing, second]
    assert moved == [nothing, *pause, *pause]


@pytest.mark.parametrize("overlap", [0, 1])
def test_under_another_layout_exchanges_are_in_the_steps_that_wait(overlap: int) -> None:
    """There the method starts again, and the run's steps do not."""
    replicas = start(2, **{**PLAIN, "interval": 3}, overlap=overlap)
    replicas.begun = 4  # no multiple of the interval
    sent, meets = 0, []
    for step in range(4, 12):
        replicas.step()
        replicas.syncs[0].state_dict()  # waits for what is under way
        now = replicas.syncs[0].bytes_sent
        if now > sent:
            meets.append(step)
        sent = now
    assert meets == [6, 9]
    due = {step for step in range(4, 12) if replicas.syncs[0].due(step)}
    assert due >= {*meets, *(step + overlap for step in meets)}


@pytest.mark.parametrize("bits", [4, 16])
def test_fewer_bits_send_less_and_keep_replicas_equal(bits: int) -> None:
    found = end(start(2, bits=bits, interval=2), 4)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 10, "fragments": 3}, "use an interval that is a multiple"),
        ({"interval": 4, "overlap": 4}, "exchanged every 4 steps"),
        ({"bits": 12}, "12"),
    ],
)
def test_what_cannot_be_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config(**options)

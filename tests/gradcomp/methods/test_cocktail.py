"""CocktailSGD's laws: one global copy, nothing lost, exact where it can be, delays as published."""

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tests.gradcomp.replicas import Replicas, flat, make_net
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.methods.cocktail import Config, build
from thinpipe.gradcomp.registry import parse_options
from thinpipe.pipeline.wire.header import DesyncError
from thinpipe.pipeline.wire.sparse import SparseCodec
from thinpipe.pipeline.wire.subset import random_subset

EXACT = {"subset": 1.0, "topk": 1.0, "bits": 32}
SMALL = {"subset": 0.5, "topk": 0.3, "bits": 4}


def test_the_global_copy_is_the_same_everywhere_in_bf16() -> None:
    options = {**SMALL, "delayed": False, "bucket_mb": 1e-4}
    replicas = Replicas(3, "cocktail", options, dtype=torch.bfloat16)
    start = replicas.global_parameters()[0].clone()
    for _ in range(6):
        replicas.step()
        first, *others = replicas.global_parameters()
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(start, first)
    assert not torch.equal(*replicas.parameters()[:2])


def test_small_steps_survive_in_bf16() -> None:
    """Updates of a hundredth of the resolution would vanish if they were rounded one by one."""
    replicas = Replicas(2, "cocktail", {**EXACT, "delayed": False}, dtype=torch.bfloat16)
    replicas.step()
    bucket = replicas.syncs[0]._buckets[0]  # type: ignore[attr-defined]
    held = bucket.local_N.float() + bucket.left_N
    torch.testing.assert_close(held, bucket.global_N, rtol=1e-6, atol=1e-6)
    assert bucket.left_N.abs().max() > 0
    assert torch.equal(bucket.local_N, bucket.global_N.bfloat16())


def test_one_replica_is_left_alone() -> None:
    replicas, plain = Replicas(1, "cocktail", SMALL), make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(3):
        replicas.step()
        generator = torch.Generator().manual_seed(1000 * step)
        (plain(torch.randn(4, 6, generator=generator)).square().sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(flat(replicas.nets[0]), flat(plain))
    assert torch.equal(replicas.global_parameters()[0], flat(plain))
    assert replicas.syncs[0].bytes_sent == 0


class Simulated:
    """Algorithm 1, written down as in the paper, in one process."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        self.nets = [make_net() for _ in range(size)]
        self.optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in self.nets]
        self.g = flat(self.nets[0])
        self.e = torch.zeros_like(self.g)
        self.options, self.size = options, size
        self.number = 0
        self.answer: list[tuple[slice, Any, list[Tensor], Tensor]] = []

    def step(self, number: int) -> None:
        for rank, net in enumerate(self.nets):
            generator = torch.Generator().manual_seed(1000 * number + rank)
            (net(torch.randn(4, 6, generator=generator)).square().sum() / 4).backward()
        self.apply()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.exchange()
        if not self.options["delayed"]:
            self.apply()

    def exchange(self) -> None:
        codec = SparseCodec(self.options["topk"], self.options["bits"])
        start = 0
        for server, length in enumerate(len(p) for p in self.g.tensor_split(self.size)):
            part = slice(start, start + length)
            start += length
            subset = random_subset(
                length, fraction=self.options["subset"], seed=0, step=self.number, bucket=server
            )
            chosen = torch.zeros(length)
            subset.scatter(torch.ones(subset.size), chosen)
            M = chosen.bool()
            sent = [self.coded(codec, (flat(net) - self.g)[part][M]) for net in self.nets]
            target = sum(sent) / self.size + self.e[part][M]
            result = self.coded(codec, target)
            self.e[part] = self.e[part].masked_scatter(M, target - result)
            self.answer.append((part, M, sent, result))
        self.number += 1

    @staticmethod
    def coded(codec: SparseCodec, x: Tensor) -> Tensor:
        seen = torch.zeros_like(x)
        if x.numel():
            codec.encode(x, torch.empty(codec.capacity(x.numel()), dtype=torch.uint8), seen)
        return seen

    @torch.no_grad()
    def apply(self) -> None:
        for part, M, sent, result in self.answer:
            for net, own in zip(self.nets, sent, strict=True):
                x = flat(net)
                x[part] = x[part].masked_scatter(M, x[part][M] + result - own)
                nn.utils.vector_to_parameters(x, net.parameters())
            self.g[part] = self.g[part].masked_scatter(M, self.g[part][M] + result)
        self.answer = []


def assert_alike(replicas: Replicas, simulated: Simulated) -> None:
    for found, net in zip(replicas.parameters(), simulated.nets, strict=True):
        torch.testing.assert_close(found, flat(net), rtol=1e-5, atol=1e-5)
    first, *others = replicas.global_parameters()
    torch.testing.assert_close(first, simulated.g, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("options", [SMALL, EXACT])
def test_every_step_equals_a_simulation(options: dict[str, Any], delayed: bool) -> None:
    """And so does what `finish` makes of the last exchange."""
    options = {**options, "delayed": delayed}
    replicas, simulated = Replicas(3, "cocktail", options), Simulated(3, options)
    for step in range(9):
        replicas.step()
        simulated.step(step)
        assert_alike(replicas, simulated)
        if options["topk"] == 1.0 and not delayed:  # nothing is left out
            assert all(torch.equal(p, replicas.parameters()[0]) for p in replicas.parameters())
    before = replicas.global_parameters()[0]
    replicas.finish()
    simulated.apply()
    assert_alike(replicas, simulated)
    assert torch.equal(before, replicas.global_parameters()[0]) == (not delayed)


def test_warm_up_averages_gradients_and_keeps_replicas_equal() -> None:
    replicas = Replicas(2, "cocktail", {**SMALL, "warmup_steps": 3})
    plain = Replicas(2, "allreduce", {})
    for _ in range(3):
        replicas.step()
        plain.step()
        for found in (*replicas.parameters(), *replicas.global_parameters()):
            assert torch.equal(found, plain.parameters()[0])
    for _ in range(2):
        replicas.step()
    first, second = replicas.parameters()
    assert not torch.equal(first, second)


def test_gradients_are_those_of_the_replica_alone() -> None:
    replicas = Replicas(2, "cocktail", SMALL)
    replicas.backward()
    shared = [p.grad.clone() for p in replicas.nets[1].parameters() if p.grad is not None]
    replicas.syncs[1].before_step()
    own = [p.grad for p in replicas.nets[1].parameters() if p.grad is not None]
    assert all(torch.equal(after, 2 * before) for after, before in zip(own, shared, strict=True))


def test_weights_loaded_after_building_are_the_global_ones() -> None:
    replicas = Replicas(2, "cocktail", SMALL)
    other = make_net(seed=5)
    for net in replicas.nets:
        net.load_state_dict(other.state_dict())
    replicas.backward()
    assert torch.equal(replicas.global_parameters()[0], flat(other))


def test_replicas_that_start_apart_are_noticed() -> None:
    replicas = Replicas(2, "cocktail", {**SMALL, "delayed": False})
    replicas.nets[1].load_state_dict(make_net(seed=5).state_dict())
    with pytest.raises(DesyncError, match="digest of the global model"):
        replicas.step()


def test_parameters_that_moved_elsewhere_are_noticed() -> None:
    replicas = Replicas(2, "cocktail", SMALL)
    replicas.nets[0].load_state_dict(make_net().state_dict(), assign=True)
    parameter = next(replicas.nets[1].parameters())
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match="got other storage"):
        replicas.step()


def test_a_checkpoint_of_an_earlier_version_goes_on() -> None:
    """It holds what an exchange had found, which is found again."""
    replicas = Replicas(2, "cocktail", SMALL)
    for _ in range(3):
        replicas.step()
    owners = (replicas.nets, replicas.syncs)
    nets, syncs = copy.deepcopy([[one.state_dict() for one in each] for each in owners])
    replicas.finish()
    found = Replicas(2, "cocktail", SMALL)
    for rank, state in enumerate(syncs):
        found.nets[rank].load_state_dict(nets[rank])
        assert state.pop("pending")
        found.syncs[rank].load_state_dict({**state, "under_way": [["found"]]})
    found.finish()
    assert all(map(torch.equal, found.parameters(), replicas.parameters()))


def test_the_authors_names_are_accepted() -> None:
    config = parse_options("cocktail", {"RANDOMP_RATIO": 0.4, "TOPK_RATIO": 0.5, "QUANT_BITS": 8})
    assert config == Config(subset=0.4, topk=0.5, bits=8)


@pytest.mark.parametrize(
    ("options", "reported"),
    [({"bits": 9}, "bits = 9"), ({"subset": 0}, "greater than 0"), ({"subset": 2**-0.5}, "ratio")],
)
def test_impossible_settings_are_rejected(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValidationError, match=reported):
        parse_options("cocktail", options)


def test_a_model_in_fp16_is_rejected() -> None:
    with pytest.raises(ValueError, match="parameters in fp16; use fp32 or bf16"):
        build(Config(), [*nn.Linear(2, 2).half().parameters()], local_peers(2)[0])

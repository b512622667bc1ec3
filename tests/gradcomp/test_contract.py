"""What every method in gradcomp/methods must meet, on replicas in one process."""

import copy
import functools
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.gradcomp.replicas import Replicas, Through, all_of
from thinpipe.gradcomp.decentral import Decentral
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import (
    goes_on,
    load_method,
    method_names,
    parse_options,
)
from thinpipe.pipeline.comm.errors import TransportError

every_method = pytest.mark.parametrize("name", method_names())


def forms() -> list[str]:
    """Every method, and as "name, delayed" with that option turned from its default."""
    turned = [n for n in method_names() if "delayed" in load_method(n).Config.model_fields]
    return [*method_names(), *(f"{name}, delayed" for name in turned)]


every_form = pytest.mark.parametrize("form", forms())


def start(form: str, size: int, device: str = "cpu") -> Replicas:
    """Replicas with several buckets, which exchange at least every other step."""
    options = {"bucket_mb": 1e-4, "interval": 2, "warmup_steps": 1, "overlap": 1}
    if form.startswith("cocktail"):
        del options["warmup_steps"]
    name, chosen = options_of(form, options)
    return Replicas(size, name, chosen, device=device)


def options_of(form: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method, and those of the options that it has."""
    name, _, turned = form.partition(", ")
    fields = load_method(name).Config.model_fields
    chosen = {option: value for option, value in options.items() if option in fields}
    return name, chosen | ({turned: not fields[turned].default} if turned else {})


def train(replicas: Replicas, steps: int = 4, *, restarts: Sequence[int] = ()) -> list[Tensor]:
    for step in range(steps):
        if step in restarts:
            replicas.restart()
        replicas.step()
    return replicas.parameters()


@functools.cache
def whole(form: str) -> list[Tensor]:
    """What two replicas have after four steps without anything between."""
    return train(start(form, 2))


def assert_same(found: Any, expected: Any) -> None:
    leaves = [torch.utils._pytree.tree_leaves(each) for each in (found, expected)]
    for one, other in zip(*leaves, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@every_form
def test_replicas_are_equal_when_the_method_says_so(form: str) -> None:
    replicas = start(form, 3)
    first, *others = train(replicas, 3)
    equal = all(torch.equal(first, other) for other in others)
    method = load_method(form.partition(", ")[0])
    assert equal == replicas.syncs[0].replicas_equal == method.REPLICAS_EQUAL


@every_form
def test_resume_is_bit_exact(form: str) -> None:
    """Also while an exchange is under way."""
    assert_same(train(start(form, 2), restarts=(2, 3)), whole(form))


@every_form
def test_saving_and_evaluating_change_nothing(form: str) -> None:
    replicas = start(form, 2)
    for _ in range(4):
        replicas.step()
        for sync in replicas.syncs:
            sync.state_dict()
        replicas.global_parameters()
    assert_same(replicas.parameters(), whole(form))


@every_form
def test_finish_applies_what_is_under_way_once(form: str) -> None:
    replicas = start(form, 2)
    train(replicas)
    replicas.finish()
    finished, sent = replicas.parameters(), [sync.bytes_sent for sync in replicas.syncs]
    replicas.finish()
    assert_same(replicas.parameters(), finished)
    assert [sync.bytes_sent for sync in replicas.syncs] == sent
    resumed = start(form, 2)
    train(resumed)
    resumed.restart()  # what an exchange under way found is kept
    resumed.finish()
    assert_same(resumed.parameters(), finished)


@every_form
def test_steps_that_are_not_due_send_nothing(form: str) -> None:
    replicas = start(form, 2)
    for step in range(3):
        before = [sync.bytes_sent for sync in replicas.syncs]
        due = {sync.due(step) for sync in replicas.syncs}
        assert len(due) == 1  # replicas know alike who waits
        replicas.step()
        for sync in replicas.syncs:
            sync.state_dict()  # waits
        sent = [sync.bytes_sent - old for sync, old in zip(replicas.syncs, before, strict=True)]
        neighbours = isinstance(replicas.syncs[0], Decentral)  # no step waits for all
        assert due == {True} or sent == [0, 0] or neighbours
    scopes = {sync.loss_scope for sync in replicas.syncs}
    assert due == {True} or scopes == {"replica"}  # to count all tokens is to wait for others


@every_form
def test_a_single_replica_sends_nothing(form: str) -> None:
    replicas = start(form, 1)
    train(replicas)
    replicas.finish()
    assert replicas.syncs[0].bytes_sent == 0


@every_method
def test_unknown_options_are_rejected(name: str) -> None:
    with pytest.raises(ValidationError):
        parse_options(name, {"no_such_option": 1})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_form
def test_replicas_on_a_gpu_agree_and_resume(form: str) -> None:
    replicas = start(form, 2, "cuda")
    found = train(replicas)
    assert_same(train(start(form, 2, "cuda"), restarts=(2, 3)), found)
    assert torch.equal(*found) == replicas.syncs[0].replicas_equal


def _given(replicas: Replicas, number: int, *, finite: bool) -> bool:
    """A step with gradients that depend on its number alone; return whether it counts."""
    replicas.begin()
    for rank, net in enumerate(replicas.nets):
        generator = torch.Generator().manual_seed(10 * number + rank)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if rank == 1 and not finite:
                parameter.grad[0] = torch.nan
    all_of(replicas.syncs, lambda sync: sync.before_step())
    found = [p.grad for net in replicas.nets for p in net.parameters() if p.grad is not None]
    # the loss is not finite then either, whatever the method leaves in the gradients
    counts = finite and all(bool(gradient.isfinite().all()) for gradient in found)
    replicas.commit()
    if counts:
        replicas.optimize()
        all_of(replicas.syncs, lambda sync: sync.after_step())
    return counts


@pytest.mark.parametrize("form", [form for form in forms() if start(form, 2).syncs[0].due(0)])
def test_a_step_that_does_not_count_costs_that_step_alone(form: str) -> None:
    """Nor what another step learnt: all goes on as if it had not been."""
    broken, smooth = start(form, 2), start(form, 2)
    for number in range(6):
        if number == 3:
            assert not _given(broken, 99, finite=False)
            broken.restart()  # what waits to be applied is saved, too
        assert _given(broken, number, finite=True)
        assert _given(smooth, number, finite=True)
    assert_same(broken.parameters(), smooth.parameters())


@dataclass
class Moving(Through):
    """Peers whose group changes under a method, and can break."""

    broken: bool = False

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        if self.broken:
            raise TransportError("replica 1 -> replica 0: lost")
        return super().exchange(outgoing, sources, capacity, lane)


def moved(state: Any, rank: int, size: int) -> Any:
    """A state in which what the server of a shard owes has become what its replica has to send."""
    reducer = state.get("reducer", {})
    kept = reducer.get("residuals", reducer)
    sent = {name: kept[name] for name in kept if not name.startswith("served-")}
    for name in kept.keys() - sent.keys():
        shards = sent[name.replace("served", "sent")].tensor_split(size)  # views
        shards[rank].add_(kept[name])
    return {**state, "reducer": {**reducer, "residuals": sent} if kept is not reducer else sent}


def goes_on_as(form: str) -> bool:
    name, options = options_of(form, {})
    return goes_on(name, parse_options(name, options))


ABLE = [form for form in forms() if goes_on_as(form)]
"""Those that can go on without a replica."""
EQUAL = [form for form in ABLE if load_method(form.partition(", ")[0]).REPLICAS_EQUAL]
LOCAL = ["async_average", "diloco", "sparse_loco"]
OPTIONS = {"bucket_mb": 1e-4, "interval": 3, "overlap": 0, "warmup_steps": 1}


def four(form: str) -> tuple[Replicas, list[Moving]]:
    """After three steps."""
    moving = [Moving(peers) for peers in local_peers(4)]
    name, options = options_of(form, OPTIONS)
    replicas = Replicas(4, name, options, peers=moving)
    train(replicas, 3)
    return replicas, moving


def leave(replicas: Replicas, moving: list[Moving], survivors: list[int]) -> None:
    """All but these are lost; the others have new groups."""
    left = local_peers(len(survivors))
    for peers, inner in zip((moving[rank] for rank in survivors), left, strict=True):
        peers.inner, peers.broken = inner, False
    replicas.peers = [moving[rank] for rank in survivors]
    owners = (replicas.nets, replicas.syncs, replicas.optimizers)
    replicas.nets, replicas.syncs, replicas.optimizers = (
        [each[rank] for rank in survivors] for each in owners
    )


def test_replicas_that_can_go_on() -> None:
    cannot = ["cocktail, delayed", "decentralized", "low_precision_decentralized", "none"]
    assert sorted(ABLE) == sorted({*forms()} - {*cannot})
    assert sorted(ABLE) == sorted([*EQUAL, *LOCAL, "cocktail"])


@pytest.mark.parametrize("name", [*EQUAL, "cocktail"])
def test_replicas_that_are_left_go_on(name: str) -> None:
    """The step under way is forgotten and done again; what survivors owe stays owed."""
    replicas, moving = four(name)
    before = replicas.parameters()
    saved = [sync.state_dict() for sync in replicas.syncs]
    for peers in moving:
        peers.broken = True
    replicas.backward()
    for sync in replicas.syncs:
        with pytest.raises(TransportError):
            sync.before_step()
        sync.abandon()
    replicas.step_number -= 1
    for optimizer in replicas.optimizers:
        optimizer.zero_grad()
    for sync, state in zip(replicas.syncs, saved, strict=True):
        assert_same(sync.state_dict(), state)
    survivors = [0, 1, 3]
    leave(replicas, moving, survivors)
    for rank, sync in zip(survivors, replicas.syncs, strict=True):
        before_it = copy.deepcopy(sync.state_dict())
        sync.regroup(rank, 4)
        if name in EQUAL:
            assert_same(sync.state_dict(), moved(before_it, rank, 4))
    train(replicas, 3)
    first, *others = replicas.global_parameters()
    assert all(torch.equal(first, other) for other in others)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, before[0])


def test_servers_of_cocktail_owe_nothing_to_a_new_group() -> None:
    """But if it is the old one, of which connections broke."""
    replicas, moving = four("cocktail")
    owed = [sync.state_dict()["error"] for sync in replicas.syncs]
    for rank, sync in enumerate(replicas.syncs):
        sync.regroup(rank, 4)
    assert_same([sync.state_dict()["error"] for sync in replicas.syncs], owed)
    assert any(bool(error_n.any()) for errors in owed for error_n in errors)
    leave(replicas, moving, [0, 1, 3])
    moves = replicas.parameters()
    for rank, sync in zip([0, 1, 3], replicas.syncs, strict=True):
        sync.regroup(rank, 4)
        assert not any(bool(error_n.any()) for error_n in sync.state_dict()["error"])
    assert_same(replicas.parameters(), moves)


@pytest.mark.parametrize("name", ["cocktail", "qadam"])
def test_a_replica_that_is_lost_in_a_warm_up_is_waited_for(name: str) -> None:
    """Who settles has nothing under way: groups can change."""
    peers = [Moving(each) for each in local_peers(2, timeout_s=0.2)]
    options = {**options_of(name, OPTIONS)[1], "warmup_steps": 9}
    replicas = Replicas(2, name, options, peers=peers)
    train(replicas, 1)
    sync, net = replicas.syncs[0], replicas.nets[0]
    sync.begin_step(1, 1)
    net(torch.ones(4, 6)).sum().backward()
    sync.settle()
    began_s = time.monotonic()
    with pytest.raises(TransportError):
        sync.before_step()
    assert time.monotonic() - began_s < 0.1, "it had failed already"


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("survivors", [[0, 1, 3], [2]])
def test_replicas_that_are_left_meet_without_the_others(name: str, survivors: list[int]) -> None:
    """A meeting that fails leaves no trace: they go on as those whose peers left before it."""
    broken, smooth = four(name), four(name)
    for peers in broken[1]:
        peers.broken = True
    for sync in broken[0].syncs:
        with pytest.raises(TransportError):
            sync.meet(3, lambda exchange: exchange())
        sync.abandon()
    for replicas, moving in (broken, smooth):
        leave(replicas, moving, survivors)
        for rank, sync in zip(survivors, replicas.syncs, strict=True):
            sync.regroup(rank, 4)
        train(replicas, 4)  # they meet before the first and the last
    assert_same(broken[0].parameters(), smooth[0].parameters())
    found = [sync.alike() for sync in broken[0].syncs]
    assert all(bool(tensor.isfinite().all()) for tensor in found[0])
    for other in found:
        assert_same(other, found[0])


@pytest.mark.parametrize("name", LOCAL)
def test_an_exchange_that_loses_a_replica_while_others_train_is_made_again(name: str) -> None:
    """Whether it had failed or not, and also if the run was saved or restarted meanwhile."""
    found = _lost_under_way(name)
    assert_same(_lost_under_way(name, fails=True), found)
    assert_same(_lost_under_way(name, restarts=[3]), found)
    assert_same(_lost_under_way(name, restarts=[4]), found)


def _lost_under_way(name: str, *, fails: bool = False, restarts: Sequence[int] = ()) -> Any:
    """Parameters of three replicas after an exchange of four; some restart as so many."""
    moving, survivors = [Moving(peers) for peers in local_peers(4)], [0, 1, 3]
    options = {**options_of(name, OPTIONS)[1], "interval": 4, "overlap": 2}
    replicas = Replicas(4, name, options, peers=moving)
    train(replicas, 4)
    for peers in moving:
        peers.broken = fails
    train(replicas, 1)  # begins it
    if 4 in restarts:
        replicas.restart()
    for sync in replicas.syncs:
        with pytest.raises(TransportError) if fails else nullcontext():
            assert sync.state_dict()["under_way"]
    replicas.syncs[0].abandon()
    leave(replicas, moving, survivors)
    before = replicas.syncs[0].alike()[0].clone()
    for rank, sync in zip(survivors, replicas.syncs, strict=True):
        sync.regroup(rank, 4)
        assert not sync.state_dict()["under_way"]
    if 3 in restarts:
        replicas.restart()
    train(replicas, 2)
    first, *others = [sync.alike() for sync in replicas.syncs]
    assert not torch.equal(first[0], before)
    for other in others:
        assert_same(other, first)
    return replicas.parameters()


@pytest.mark.parametrize("name", ABLE)
def test_who_abandons_what_it_has_not_begun_loses_nothing(name: str) -> None:
    """As a replica does that was about to begin a step; its messages still are the others'."""
    (disturbed, _), (undisturbed, _) = four(name), four(name)
    disturbed.syncs[1].abandon()
    assert_same(train(disturbed, 4), train(undisturbed, 4))


def test_one_that_is_left_resumes_alone() -> None:
    """What it had not exchanged yet, it applies by itself."""
    for name in ("ef_gradients, delayed", "demo", "cocktail"):
        replicas, moving = four(name)
        leave(replicas, moving, [2])
        replicas.syncs[0].regroup(2, 4)
        train(replicas, 2)
        replicas.peers = local_peers(1)
        replicas.restart()
        (found,) = train(replicas, 3)
        assert torch.isfinite(found).all(), name


@pytest.mark.parametrize("name", LOCAL)
def test_one_that_joins_holds_what_the_others_hold_alike(name: str) -> None:
    """Before they meet, from the global parameters; and it owes what its donor does."""
    replicas, moving = four(name)
    train(replicas, 3)  # they meet before the first of these
    assert all(sync.lets_in(6) and not sync.lets_in(7) for sync in replicas.syncs)
    sync = _joined(replicas, moving, name)
    assert_same(sync.state_dict()["outer"], replicas.syncs[0].state_dict()["outer"])
    train(replicas, 4)
    assert_same([sync.alike() for sync in replicas.syncs], 5 * [replicas.syncs[0].alike()])


@pytest.mark.parametrize("name", [*EQUAL, "cocktail"])
def test_one_that_joins_between_two_steps_goes_on_with_the_others(name: str) -> None:
    """It takes part in the exchange of the step before; with cocktail it owes what another does."""
    replicas, moving = four(name)
    sync = _joined(replicas, moving, name)
    assert sync.lets_in(3)
    if name == "cocktail":
        owed = replicas.parameters()[0] - replicas.global_parameters()[0]
        assert owed.any()
        assert torch.equal(replicas.parameters()[4] - replicas.global_parameters()[4], owed)
    train(replicas, 4)
    assert_same(replicas.global_parameters(), 5 * [replicas.global_parameters()[0]])


def _joined(replicas: Replicas, moving: list[Moving], form: str) -> Any:
    """A fifth that has joined four."""
    alone = [Moving(peers) for peers in local_peers(1)]
    name, options = options_of(form, OPTIONS)
    newcomer = Replicas(1, name, options, peers=alone)
    for peers, inner in zip([*moving, *alone], local_peers(5), strict=True):
        peers.inner = inner
    for rank, sync in enumerate(replicas.syncs):
        sync.regroup(rank, 4)
    (sync,), (net,) = newcomer.syncs, newcomer.nets
    sync.regroup(0, 1)
    with replicas.syncs[0].parameters_to_give():
        net.load_state_dict(replicas.nets[0].state_dict())
    newcomer.optimizers[0].load_state_dict(copy.deepcopy(replicas.optimizers[0].state_dict()))
    sync.load_state_dict(copy.deepcopy(replicas.syncs[0].shared_state()))
    assert_same(sync.alike(), replicas.syncs[0].alike())
    for owners, own in (
        (replicas.nets, newcomer.nets),
        (replicas.syncs, newcomer.syncs),
        (replicas.optimizers, newcomer.optimizers),
    ):
        owners += own
    return sync

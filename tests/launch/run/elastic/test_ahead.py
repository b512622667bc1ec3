"""What is sent ahead to a newcomer: copies of gradients, and when that is given up."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.waiting import until
from thinpipe.launch.run.elastic import ahead, messages
from thinpipe.launch.run.elastic.ahead import Giver, Givers, Taker
from thinpipe.launch.run.elastic.messages import Tell, now_and_then
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.weights import as_bytes
from thinpipe.pipeline.comm.errors import TransportError

VALUES = [0.0, -0.0, 1.5, float("nan"), float("-inf"), 1e-45, 0.0]


class Sync:
    """What replicas have in common is one tensor."""

    replicas_equal = sends_ahead = True

    def __init__(self) -> None:
        self.common = torch.zeros(8)

    def parameters_to_give(self) -> AbstractContextManager[None]:
        return nullcontext()

    def shared_state(self) -> dict[str, Any]:
        return {"common": self.common}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.common = state["common"]


class Stage:
    """What is asked of a stage."""

    stage_index = 0

    def __init__(self, module: nn.Module) -> None:
        self.submod = module


class Built:
    """A model of one layer, with what `Giver` uses of a run's parts."""

    def __init__(self) -> None:
        self.stages: list[Any] = []
        self.sync = Sync()
        self.layer = nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        self.layer(torch.ones(2, 64)).square().sum().backward()
        self.optimizer.step()


def gone_on(giver: Giver) -> bool:
    return giver.goes_on(has_met=False)


def taken(other: Any, coming: list[Tensor], tell: Tell = lambda _: None) -> Taker:
    """What a newcomer has when all that is coming has come."""
    taker = Taker(other, lambda: lambda tensor: tensor.copy_(coming.pop(0)), tell)
    taker._thread.join(20)
    return taker


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("zeros", [0, 40])
def test_gradients_come_back_bit_for_bit(kind: torch.dtype, zeros: int) -> None:
    """All of them, or those that are not zero if these are few."""
    flat = torch.cat([torch.tensor(VALUES), torch.zeros(zeros)]).to(kind)
    gradient = nn.Parameter(flat.view(1, -1))
    parts = messages.without_zeros(gradient)
    back = messages.with_zeros(parts, gradient)
    assert back.shape == gradient.shape
    assert back.view(torch.uint8).equal(gradient.detach().view(torch.uint8))
    assert (len(parts) == 2) == (zeros > 0)
    assert messages.without_zeros(None) == []


def test_without_room_for_a_copy_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 0 must not run out of memory: the run ends with it."""
    monkeypatch.setattr(ahead, "free_memory", lambda: 1000)
    built, sent = Built(), list[Tensor]()
    givers = Givers(built)  # type: ignore[arg-type]
    givers.follow()
    assert givers.give(sent.append, lambda: None, 1.0, lambda _: None) == 0
    assert not sent
    givers.goes_on(has_met=False)
    assert not givers._all


def giving() -> tuple[Built, Giver]:
    built = Built()
    givers, giver = Givers(built), Giver(built)  # type: ignore[arg-type]
    givers.follow()
    giver.begin()
    givers._all.append(giver)
    return built, giver


def test_a_copy_is_made_in_the_middle_of_a_step_but_not_of_the_optimizers() -> None:
    """What it has not seen follows: the newcomer ends where the others do."""
    built, other, coming = Built(), Built(), list[Tensor]()
    built.stages, other.stages = [Stage(built.layer)], [Stage(other.layer)]
    givers, ended, copied = Givers(built), threading.Event(), threading.Event()  # type: ignore[arg-type]
    givers.follow()

    def send(part: Tensor) -> None:
        coming.append(part.clone())
        copied.set()

    def give() -> None:
        givers.give(send, lambda: None, 20.0, lambda _: None)
        ended.set()

    def hold_up(*_: Any) -> None:
        thread.start()
        assert not copied.wait(0.3)

    thread = threading.Thread(target=give, daemon=True)
    inside = built.optimizer.register_step_pre_hook(hold_up)
    built.step()
    inside.remove()
    built.layer(torch.ones(2, 64)).square().sum().backward()
    assert copied.wait(20)
    built.optimizer.step()
    givers.end()
    assert ended.wait(20)
    assert taken(other, coming).steps == 1
    assert other.layer.weight.equal(built.layer.weight)


def test_of_local_steps_nothing_is_copied_before_training_comes_to_it() -> None:
    """In the middle of a step weights may be those of one replica alone; it sends no gradients."""
    built = Built()
    built.sync.replicas_equal = False  # type: ignore[misc]
    givers, sent = Givers(built), list[Tensor]()  # type: ignore[arg-type]
    givers.follow()
    done = threading.Event()

    def give() -> None:
        givers.give(sent.append, done.set, 20.0, lambda _: None)

    threading.Thread(target=give, daemon=True).start()
    until(lambda: bool(givers._all))
    built.step()
    assert not sent
    givers.goes_on(has_met=False)
    assert done.wait(20)
    count = len(sent)
    built.step()
    givers.end()
    assert not givers._all[0]._messages
    until(lambda: len(sent) > count)  # the end


class Nested(torch.optim.SGD):
    """Steps in the class above, whose step has hooks, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("fails", [False, True])
def test_an_optimizer_may_step_in_another_or_fail(fails: bool) -> None:
    """A step is kept once; who cannot copy in time sends nothing, and training goes on."""
    built, sent = Built(), list[Tensor]()
    torch.optim.SGD(built.layer.parameters())  # from here on hooks are called in it
    built.optimizer = Nested(built.layer.parameters(), lr=0.1)
    givers, giver = Givers(built), Giver(built)  # type: ignore[arg-type]
    givers.follow()
    giver.begin()
    givers._all.append(giver)
    if not fails:
        built.step()
        assert len(giver._messages) == 1
        return
    built.optimizer.zero_grad()
    built.optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises(TypeError):
        built.step()
    built.optimizer.param_groups[0]["lr"] = 0.1
    built.step()
    with ThreadPoolExecutor(1) as pool:  # another thread than the optimizer's
        nbytes = pool.submit(givers.give, sent.append, lambda: None, 0.1, lambda _: None)
        assert nbytes.result(20) == 0
    assert not sent


@pytest.mark.parametrize("met", [0, 2])
@pytest.mark.parametrize("damaged", [False, True])
def test_of_local_steps_moments_come_once_and_the_global_model_as_it_is(
    damaged: bool, met: int
) -> None:
    """Of several exchanges while something is sent, what the last one led to is sent next."""
    built, other = Built(), Built()
    built.sync.replicas_equal = other.sync.replicas_equal = False  # type: ignore[misc]
    built.step()
    other_weight, moment = other.layer.weight.clone(), built.optimizer.state_dict()["state"][0]
    expected, coming, closed = moment["exp_avg"].clone(), list[Tensor](), list[int]()
    giver = Giver(built)  # type: ignore[arg-type]
    assert gone_on(giver)
    for _ in range(met):
        built.step()
        built.sync.common = built.sync.common + 1
        assert giver.goes_on(has_met=True)
    giver.end()
    assert giver.give(lambda part: coming.append(part.clone()), lambda: closed.append(1), 1) > 0
    assert closed
    assert not gone_on(giver)
    if damaged:
        moments = max(coming, key=len)
        moments[0] ^= 1
    taker = taken(other, coming)
    found = other.optimizer.state_dict()["state"][0]["exp_avg"]
    assert taker.has_state == torch.equal(found, expected) == (not damaged)
    assert torch.equal(other.layer.weight, other_weight)
    assert bool(other.sync.common.eq(met).all()) == (not damaged or met == 0)


def test_both_ends_say_how_much_of_a_state_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_PIECE_NBYTES", 20_000)  # two: the state has 33 kB
    monkeypatch.setattr(messages, "_TELL_S", -1.0)
    built, other, coming, said = Built(), Built(), list[Tensor](), list[str]()
    giver = Giver(built)  # type: ignore[arg-type]
    giver.begin()
    giver.end()
    tell = now_and_then(said.append, "sent")
    giver.give(lambda part: coming.append(part.clone()), lambda: None, 1, tell)
    assert said[-1] == "sent: 0.0 MB are left"
    said.clear()
    taken(other, coming, now_and_then(said.append, "taken"))
    assert said == ["taken: 0.0 MB are left"]  # and nothing once all is there


@pytest.mark.parametrize("steps", [1, 9])
def test_steps_that_come_faster_than_they_are_sent_are_not_kept(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dense step is a third of a state; nobody waits for that at the end either."""
    monkeypatch.setattr(ahead, "_LITTLE_NBYTES", 0)
    built, giver = giving()
    for _ in range(steps):
        built.step()
    assert gone_on(giver) == (steps == 1)
    giver.end()
    assert not giver._messages


def test_who_has_given_up_sends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_LITTLE_NBYTES", 0)
    built, giver = giving()
    sent = list[Tensor]()

    def send(tensor: Tensor) -> None:
        sent.append(tensor)
        for _ in range(9):
            built.step()

    with pytest.raises(TransportError, match="steps come faster than they are sent"):
        giver.give(send, lambda: None, 1.0)
    assert len(sent) == 1


def test_what_cannot_be_sent_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    built, giver = giving()
    monkeypatch.setattr(ahead, "without_zeros", lambda gradient: gradient["none"])
    built.step()
    assert not gone_on(giver)


def test_the_optimizer_tells_nothing_after_the_end() -> None:
    built, giver = giving()
    giver.end()
    built.step()
    assert not giver._messages
    assert not gone_on(giver)


@pytest.mark.parametrize(
    "length",
    [-1, 1 << 40, {"tree": [], "tensors": [["weight", "float32", [1 << 20, 1 << 20]]]}],
    ids=["below nothing", "header", "tensor"],
)
def test_a_newcomer_makes_no_room_for_more_than_its_model_needs(
    length: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A header of 1 TB, or one that announces a tensor of 4 TB."""
    text = json.dumps(length).encode() if isinstance(length, dict) else b""
    coming = [as_bytes(torch.tensor([len(text) if text else length]))]
    coming += [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []
    assert not taken(Built(), coming).has_state
    assert "a state was not taken ahead: ValueError: the other end offers" in caplog.text


@pytest.mark.parametrize(("offload", "sent"), [(False, True), (True, False)])
def test_who_makes_steps_that_a_newcomer_cannot_make_sends_nothing_ahead(
    offload: bool, sent: bool
) -> None:
    """With offload the optimizer makes them in parts."""
    notes = list[str]()
    run: Any = SimpleNamespace(
        _config=SimpleNamespace(pipeline=SimpleNamespace(offload=offload, peer_timeout_s=0)),
        _givers=SimpleNamespace(give=lambda *_: 8),
        display=SimpleNamespace(note=notes.append),
    )
    ElasticTraining.give(run, lambda _: None, lambda: None)
    assert bool(notes) == sent

"""Ends of a cut whose caches differ agree to drop what differs; nothing is trained through."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.ranks import run_ranks
from tests.training import batch, config, start
from thinpipe.aqsgd.disk import DiskStore
from thinpipe.aqsgd.memory import SampleMemory
from thinpipe.launch.components import Built
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.transport import Scope
from thinpipe.pipeline.step_stats import StepTotals
from thinpipe.pipeline.wire.checksum import CHECKSUM_NBYTES
from thinpipe.pipeline.wire.header import DesyncError

pytestmark = pytest.mark.dist

FORWARD = {"kind": "aqsgd", "bits": 3, "memory": 4}
AQSGD: Any = [{"forward": FORWARD, "backward": {"kind": "direct", "bits": 6}}]
GRADIENTS: Any = [{"forward": {"kind": "raw"}, "backward": {"kind": "aqsgd", "memory": 4}}]
STEPS = [batch(ids) for _ in range(3) for ids in ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12])]
ALL = torch.arange(13)

Accident = Callable[[int, Built], None]


def memories(built: Built) -> dict[int, Any]:
    """The memory at each cut of this rank."""
    codecs = [channel.codec for channel in built.engine.channels]
    return {codec.cut: codec.memory for codec in codecs if codec.memory is not None}


def store_of(memory: Any) -> DiskStore:
    store = memory._store
    assert isinstance(store, DiskStore)
    store._worker.submit(int).result()
    return store


def run(
    rank: int, settings: Any, accident: Accident | None, after: int
) -> list[tuple[StepTotals, dict[int, str], int]]:
    """Each step's totals, digests of memories, and how often all ranks exchanged numbers."""
    built = start(settings)
    built.engine.begin(ALL, STEPS[0].ids_B)
    shares = 0
    share = GlooTransport.share

    def counted(transport: GlooTransport, values: torch.Tensor, scope: Scope) -> torch.Tensor:
        nonlocal shares
        shares += 1
        return share(transport, values, scope)

    GlooTransport.share = counted  # type: ignore[method-assign]
    found = []
    for step, item in enumerate(STEPS):
        shares, upcoming = 0, STEPS[step + 1 : step + 2]
        coming_B = upcoming[0].ids_B if upcoming else torch.empty(0, dtype=torch.int64)
        totals = built.engine.train_step(item, step, coming_B)
        if step == after and accident is not None:
            accident(rank, built)
        whole = step < after or (step > after and accident not in BROKEN_DISKS)
        digests = {c: m.digest() for c, m in memories(built).items()} if whole else {}
        found.append((totals, digests, shares))
    GlooTransport.share = share  # type: ignore[method-assign]
    built.engine.close()
    return found


def settings(folder: Path, tier: str = "disk", boundary: Any = AQSGD, **memory: Any) -> Any:
    return config(
        pipeline={"cuts": [1, 2], "peer_timeout_s": 120},
        boundary=boundary,
        memory={"tier": tier, "folder": str(folder), **memory},
    )


def lose_the_file(rank: int, built: Built) -> None:
    if rank == 1:
        os.ftruncate(store_of(memories(built)[1])._file.descriptor, 0)


def flip_a_bit_at_both_ends(rank: int, built: Built) -> None:
    if rank < 2:
        store = store_of(memories(built)[1])
        file = store._file
        place = store._slots[9] * file.row_nbytes + 5
        (byte,) = os.pread(file.descriptor, 1, place)
        os.pwrite(file.descriptor, bytes([byte ^ 1]), place)


def breaks(at_rank: int, cut: int, method: str, code: int) -> Accident:
    """From here on the disk of that end of a cut fails."""

    def broken(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    def accident(rank: int, built: Built) -> None:
        if rank == at_rank:
            setattr(store_of(memories(built)[cut])._file, method, broken)

    return accident


BROKEN_DISKS = (breaks(0, 1, "write", errno.ENOSPC), breaks(2, 2, "read", errno.EIO))


def forget_a_few(rank: int, built: Built) -> None:
    if rank == 2:
        memories(built)[2].forget(torch.tensor([8, 12]))


ACCIDENTS: dict[str, tuple[Accident, int, dict[int, Any]]] = {
    # found a step later, when the rows of the step after that are fetched
    "lost file": (lose_the_file, 2, {3: {1: 8}}),
    "lost gradients": (lose_the_file, 2, {3: {1: 8}}),
    "flipped bit": (flip_a_bit_at_both_ends, 1, {2: {1: 1}}),
    "forgotten": (forget_a_few, 1, {2: {2: 2}}),
    # step 3 fetches what step 2 could not write
    "full disk": (BROKEN_DISKS[0], 1, {3: {1: 8}, 4: {1: 5}}),
    "broken disk": (BROKEN_DISKS[1], 1, {2: {2: 5}, 3: {2: 8}, 4: {2: 5}}),
}
"""What happens after which step, and what is repaired of which cut in later ones."""


def all_at_once(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        tier: run(rank, settings(folder, tier), None, -1) for tier in ("ram", "disk")
    }
    for name, (accident, after, _) in ACCIDENTS.items():
        boundary = GRADIENTS if name == "lost gradients" else AQSGD
        found[name] = run(rank, settings(folder, boundary=boundary), accident, after)
    found["apart"] = start_apart(rank, settings(folder))
    found["fresh end"] = resume_with_one_fresh_end(rank)
    found["budgets"] = with_own_budget(rank, folder)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By scenario, what each of three ranks saw."""
    by_rank = run_ranks(3, all_at_once, tmp_path_factory.mktemp("rows"))
    return {name: [one[name] for one in by_rank] for name in by_rank[0]}


def repaired(results: Any) -> list[dict[int, int]]:
    """What was repaired after each step, which all ranks know alike; memories are equal."""
    for steps in zip(*results, strict=True):
        digests = [digests for _, digests, _ in steps]
        assert len({totals.repaired for totals, _, _ in steps}) == 1
        assert digests[0].get(1) == digests[1].get(1)
        assert digests[1].get(2) == digests[2].get(2)
    return [dict(totals.repaired) for totals, _, _ in results[0]]


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_nothing_extra_is_exchanged_while_the_ends_agree(found: Any, tier: str) -> None:
    assert repaired(found[tier]) == [{}] * len(STEPS)
    assert [shares for _, _, shares in found[tier][0]] == [1] * len(STEPS)


def test_the_tiers_train_alike(found: Any) -> None:
    in_ram, on_disk = (
        [[(totals.loss, totals.wire, digests) for totals, digests, _ in rank] for rank in found[t]]
        for t in ("ram", "disk")
    )
    assert in_ram == on_disk


@pytest.mark.parametrize("name", ACCIDENTS)
def test_what_one_end_lost_both_forget_and_train_on(found: Any, name: str) -> None:
    results, expected = found[name], ACCIDENTS[name][2]
    assert {step: cuts for step, cuts in enumerate(repaired(results)) if cuts} == expected
    shares = [shares for _, _, shares in results[0]]
    once = shares[-1]  # and once more where gradients are cached, for their scale
    assert shares == [once + (step in expected) for step in range(len(STEPS))]
    assert all(totals.loss > 0 and not totals.skipped for totals, _, _ in results[0])
    control = [totals.control_bytes for totals, _, _ in results[0]]
    for step, item in enumerate(STEPS[1:]):  # repairing names the samples that come next
        # at two ends, by every rank to two, and the message's digest and checksum
        named = 2 * len(item) * 8 + 8 + CHECKSUM_NBYTES if step in expected else 0
        assert control[step] - control[-1] == 3 * 2 * named


def test_repaired_samples_are_sent_like_new_ones(found: Any) -> None:
    whole, hurt = found["disk"][0], found["forgotten"][0]
    sizes = [
        {wire.cut: wire.nbytes for wire in totals.wire if wire.direction == "forward"}
        for totals, _, _ in (whole[3], hurt[3], whole[1])
    ]
    assert sizes[0][1] == sizes[1][1]
    first, change = sizes[2][2] / 5, sizes[0][2] / 5
    assert sizes[1][2] == pytest.approx(2 * first + 3 * change)


def start_apart(rank: int, run_settings: Any) -> Any:
    """A resume on which one end has nothing and one has too much."""
    built = start(run_settings)
    built.engine.begin(ALL, STEPS[0].ids_B)
    for step, item in enumerate(STEPS[:2]):
        built.engine.train_step(item, step)
    state = {cut: memory.state_dict() for cut, memory in memories(built).items()}
    again = start(run_settings)
    for cut, memory in memories(again).items():
        if (rank, cut) != (0, 1):
            memory.load_state_dict(state[cut])
    found = again.engine.begin(ALL, STEPS[2].ids_B)
    held = {cut: len(memory) for cut, memory in memories(again).items()}
    return found, held, again.engine.train_step(STEPS[2], 2).loss > 0


def test_a_cut_whose_state_is_missing_at_one_end_starts_empty(found: Any) -> None:
    results = found["apart"]
    assert [cuts for cuts, _, _ in results] == [((1, 13),)] * 3
    assert [held for _, held, _ in results] == [{1: 0}, {1: 0, 2: 13}, {2: 13}]


def resume_with_one_fresh_end(rank: int) -> Any:
    """What is known of the first cut, forwards, is lost at its upper end."""
    boundary: Any = [{way: {"kind": "transform"} for way in ("forward", "backward")}]
    run_settings = config(pipeline={"cuts": [1, 2]}, boundary=boundary)
    built = start(run_settings)
    for step, item in enumerate(STEPS[:4]):
        built.engine.train_step(item, step)
    state = {c.codec.name: c.codec.training.state_dict() for c in built.engine.channels}
    again = start(run_settings)
    for channel in again.engine.channels:
        if (rank, channel.codec.name) != (0, "cut 1 forward"):
            channel.codec.training.load_state_dict(state[channel.codec.name])
    again.engine.begin(ALL, STEPS[4].ids_B)
    held = {c.codec.name: len(c.codec.memory) for c in again.engine.channels}  # type: ignore[arg-type]
    losses = [again.engine.train_step(STEPS[4 + i], 4 + i).loss for i in (0, 1)]
    digests = {c.codec.name: c.codec.memory.learned() for c in again.engine.channels}  # type: ignore[union-attr]
    return held, losses, digests


def test_ends_that_learned_different_things_start_again(found: Any) -> None:
    results = found["fresh end"]
    (first, losses, _), (middle, _, _), (last, _, _) = results
    assert first == {"cut 1 forward": 0, "cut 1 backward": 13}
    assert middle == {**first, "cut 2 forward": 13, "cut 2 backward": 13}
    assert last == {"cut 2 forward": 13, "cut 2 backward": 13}
    assert all(loss > 0 for loss in losses)
    for upper, lower in ((0, 1), (1, 2)):
        ours, theirs = results[upper][2], results[lower][2]
        assert all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())


def with_own_budget(rank: int, folder: Path) -> Any:
    # a row has 12 * (16 / 2 + 2) = 120 bytes; a middle rank has two ends
    budget = [10**6, 4 * 240, 120][rank]
    built = start(settings(folder, budget=budget))
    built.engine.begin(ALL, STEPS[0].ids_B)
    hits = []
    for step, item in enumerate(STEPS):
        hits.append(
            {c: int((m.fingerprints(item.ids_B) != 0).sum()) for c, m in memories(built).items()}
        )
        built.engine.train_step(item, step)
    return {c: (m.capacity, len(m), m.digest()) for c, m in memories(built).items()}, hits


def test_the_end_with_less_room_decides(found: Any) -> None:
    (first, hits), (middle, _), (last, _) = found["budgets"]
    assert (middle[1][0], last[2][0]) == (4, 1)
    assert first[1][1:] == middle[1][1:]
    assert middle[2][1:] == last[2][1:]
    assert (middle[1][1], middle[2][1]) == (4, 1)
    assert [hit[1] for hit in hits] == [0, 0, 4, 0, 4, 0]


def test_a_difference_that_could_not_be_agreed_on_is_not_trained_through() -> None:
    settings = config(pipeline={"cuts": [1]}, boundary=AQSGD)  # type: ignore[arg-type]
    with in_process(settings, total_steps=2) as built:
        built.engine.begin(ALL, STEPS[0].ids_B)
        built.engine.train_step(STEPS[0], 0)
        receiver = built.stages[1].channels.activations_in
        assert receiver is not None
        memory = receiver.codec.memory
        assert isinstance(memory, SampleMemory)
        history = memory._histories[3]
        memory._histories[3] = history._replace(generation=history.generation + 1)
        with pytest.raises(DesyncError, match=r"cut 1 forward, step 1, .*memory_crc: peer sent"):
            built.engine.train_step(STEPS[0], 1)  # nobody said that it would come

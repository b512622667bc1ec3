"""Memories change at commit, and only there."""

from typing import Any

import pytest
import torch

from thinpipe.aqsgd.coded_memory import CodedMemory
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.uniform import Uniform

CODECS = [Cast("fp32"), Cast("bf16"), Uniform(8, 64), Uniform(4, 64)]
IDS = torch.tensor([3, 8])
WIRE_2W = torch.arange(40, dtype=torch.uint8).view(2, 20)


def filled(codec: Any) -> CodedMemory:
    memory = CodedMemory(codec)
    memory.stage(IDS, torch.arange(256.0).view(2, 128), WIRE_2W)
    memory.commit()
    return memory


def visit(memory: CodedMemory, sample: int, value: float, *, keep: bool = True) -> None:
    opened = memory.open(sample, 128, torch.device("cpu"))
    opened.cached.fresh_BN.fill_(value)
    memory.close(opened, WIRE_2W[0], keep=keep)


@pytest.mark.parametrize("codec", CODECS)
def test_a_visit_is_visible_after_commit(codec: Any) -> None:
    memory = filled(codec)
    before = memory.read(IDS, 128)
    visit(memory, 8, 5.0)
    assert torch.equal(memory.open(8, 128, torch.device("cpu")).cached.old_BN.float(), before[1:])
    assert torch.equal(memory.read(IDS, 128), before)
    memory.commit()
    after = memory.read(IDS, 128)
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], torch.full((128,), 5.0), rtol=0.07, atol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_that_is_discarded_changes_nothing(codec: Any) -> None:
    memory = filled(codec)
    before = memory.digest()
    for keep in (False, True):
        visit(memory, 3, 5.0, keep=keep)
        memory.discard()
        memory.commit()
    assert memory.digest() == before


@pytest.mark.parametrize("codec", CODECS)
def test_a_visit_that_is_not_kept_loses_the_sample(codec: Any) -> None:
    """So that it comes as a first visit, whatever was held of it."""
    memory = filled(codec)
    visit(memory, 3, 5.0, keep=False)
    assert 3 in memory
    memory.commit()
    assert (memory.fingerprints(IDS) != 0).tolist() == [False, True]


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_are_filled_again_belong_to_one_sample(codec: Any) -> None:
    memory = filled(codec)
    for step in range(1, 5):
        for sample in IDS.tolist():
            visit(memory, sample, float(10 * step + sample))
        memory.commit()
        expected = torch.tensor([[10.0 * step + 3], [10.0 * step + 8]]).expand(2, 128)
        torch.testing.assert_close(memory.read(IDS, 128), expected, rtol=0.07, atol=0)


def test_a_visit_of_another_length_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"sample 3 .* length of samples changed"):
        filled(Cast("bf16")).open(3, 64, torch.device("cpu"))


def test_a_bit_that_flips_in_ram_is_noticed_at_the_next_visit_and_told_when_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = filled(Uniform(4, 64))
    before = memory.summary()
    memory.prefetch(IDS)
    memory.row(8, 128)[5] ^= 4  # by a cosmic ray
    assert memory.fingerprints(IDS).tolist() == [filled(Uniform(4, 64)).fingerprints(IDS)[0], -1]
    assert memory.fingerprints(IDS)[1] == -1, "verified once per step"
    assert memory.summary() == before, "which stands for what was put"
    again = CodedMemory(Uniform(4, 64))
    again.load_state_dict(memory.state_dict())
    assert (again.fingerprints(IDS) != 0).tolist() == [True, False]
    assert "rows of 1 samples (8, ...) were damaged when they were saved" in caplog.text
    memory.forget(IDS[1:])
    memory.prefetch(IDS)
    assert memory.fingerprints(IDS)[1] == 0


def test_two_ends_that_put_different_rows_have_different_summaries() -> None:
    one, other = filled(Uniform(4, 64)), filled(Uniform(4, 64))
    assert one.summary() == other.summary()
    visit(one, 8, 5.0)
    visit(other, 8, 5.5)  # a kernel computed wrong; the bytes that were sent are the same
    for memory in (one, other):
        memory.commit()
    assert one.fingerprints(IDS).equal(other.fingerprints(IDS))
    assert one.summary() != other.summary()

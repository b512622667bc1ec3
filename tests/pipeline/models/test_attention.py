"""Who sees whom, and at which position."""

import torch

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.attention import attention_mask, positions
from thinpipe.pipeline.models.transformer import TransformerConfig, build_layers

IDS = torch.tensor([0])
CPU = torch.device("cpu")


def _rows(samples: Samples, tokens: int, *, causal: bool) -> list[str]:
    seen = attention_mask(samples, tokens, causal=causal, device=CPU)
    assert seen is not None
    return ["".join(str(int(bit)) for bit in row) for row in seen[0, 0]]


def test_plain_samples_need_no_mask() -> None:
    assert attention_mask(None, 3, causal=True, device=CPU) is None
    assert attention_mask(Samples(IDS), 3, causal=False, device=CPU) is None


def test_no_other_token_attends_to_padding() -> None:
    padded = Samples(IDS, mask_BT=torch.tensor([[1, 1, 0]]))
    assert _rows(padded, 3, causal=False) == ["110", "110", "111"]
    assert _rows(padded, 3, causal=True) == ["100", "110", "111"]


def test_examples_do_not_see_each_other() -> None:
    packed = Samples(IDS, segments_BT=torch.tensor([[1, 1, 2, 2]]))
    assert _rows(packed, 4, causal=True) == ["1000", "1100", "0010", "0011"]


def test_a_prompt_sees_itself_in_both_directions_and_not_its_neighbour() -> None:
    packed = Samples(
        IDS, segments_BT=torch.tensor([[1, 1, 1, 2, 2]]), prefix_BT=torch.tensor([[1, 1, 0, 1, 1]])
    )
    assert _rows(packed, 5, causal=True) == ["11000", "11000", "11100", "00011", "00011"]


def test_positions_restart_with_every_example() -> None:
    segments_BT = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 2, 3, 3, 3]])
    places = positions(Samples(torch.arange(2), segments_BT=segments_BT), 6, device=CPU)
    assert places.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 0, 1, 2]]
    assert positions(None, 3, device=CPU).tolist() == [0, 1, 2]


def test_masks_are_made_where_the_samples_are() -> None:
    """A device that rejects any operation with a tensor of another stands for a GPU."""
    meta, columns_BT = torch.device("meta"), torch.ones(1, 3, dtype=torch.int64)
    samples = Samples(IDS, columns_BT, columns_BT, columns_BT).to(meta)
    seen = attention_mask(samples, 3, causal=True, device=meta)
    assert seen is not None
    assert seen.device == positions(samples, 3, device=meta).device == meta


def test_a_packed_example_is_computed_as_if_alone() -> None:
    config = TransformerConfig(layers=2, width=16, heads=2, vocab=32, context=12)
    model = build_layers(config, 0, 2, seed=1, device="cpu")
    tokens_BT = torch.randint(32, (1, 9), generator=torch.Generator().manual_seed(0))
    packed = Samples(
        IDS,
        mask_BT=torch.tensor([[1] * 8 + [0]]),
        segments_BT=torch.tensor([[1] * 5 + [2] * 3 + [0]]),
        prefix_BT=torch.tensor([[1, 1, 0, 0, 0, 1, 1, 0, 0]]),
    )
    together = model(tokens_BT, packed)
    for first, stop in ((0, 5), (5, 8)):
        assert packed.prefix_BT is not None
        alone = Samples(IDS, prefix_BT=packed.prefix_BT[:, first:stop])
        torch.testing.assert_close(
            together[:, first:stop], model(tokens_BT[:, first:stop], alone), rtol=1e-4, atol=1e-6
        )

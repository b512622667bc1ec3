"""The layout and the random numbers, against independent statements of the same definition."""

import pytest
import torch

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels.reference import uniform as reference


def test_philox_matches_the_published_vectors() -> None:
    """Known answers of Random123 (Salmon et al.): all-zero and all-one counter and key."""
    zero = Noise(key=0, step=0, row_B=torch.tensor([0]))
    words = [int(w[0, 0]) for w in reference._philox(torch.tensor([0]), zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = Noise(key=-1, step=-1, row_B=torch.tensor([-1]))
    words = [int(w[0, 0]) for w in reference._philox(torch.tensor([0xFFFFFFFF]), ones)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("numel", [1, 9, 1024, 1500, 3 * 1024 + 8])
def test_payload_is_block_planar(bits: int, numel: int) -> None:
    codes = torch.randint(
        0, 2**bits, (1, numel), generator=torch.Generator().manual_seed(numel), dtype=torch.uint8
    )
    payload = reference.pack(codes, bits)
    assert payload.shape == (1, bits * -(-numel // 8))
    assert payload[0].tolist() == _pack_one_by_one(codes[0].tolist(), bits)
    assert torch.equal(reference.unpack(payload, bits, numel), codes)


def _pack_one_by_one(codes: list[int], bits: int) -> list[int]:
    """The text of `kernels/__init__.py`, value by value."""
    payload: list[int] = []
    for start in range(0, len(codes), 1024):
        block = codes[start : start + 1024]
        lanes = -(-len(block) // 8)
        out = [0] * (bits * lanes)
        for element, code in enumerate(block):
            plane, lane, row, shift = *divmod(element, lanes), 0, 0
            for width in (8, 4, 2, 1):
                if not bits & width:
                    continue
                field = (code >> shift) & ((1 << width) - 1)
                out[(row + plane % width) * lanes + lane] |= field << (plane // width * width)
                row, shift = row + width, shift + width
        payload += out
    return payload

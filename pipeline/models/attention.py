"""Which tokens attend to which: causal or not, padding, packed examples, prefixes.

Every stage makes its own masks from what it knows of the samples; none crosses a link.

Axes: B samples, T tokens, Q query tokens, K key tokens.
"""

import torch
from torch import Tensor

from thinpipe.pipeline.batch import Samples


def attention_mask(
    samples: Samples | None, tokens: int, *, causal: bool, device: torch.device
) -> Tensor | None:
    """Boolean [B, 1, Q, K]: whether token q attends to token k; None where `causal` suffices.

    A prefix token attends to the whole prefix of its example (Tay et al., "UL2: Unifying Language
    Learning Paradigms", 2022). No token attends to padding, except that every token attends to
    itself, so that its softmax is defined.
    """
    if samples is None or samples.plain:
        return None
    prefix_BT, segments_BT, mask_BT = samples.prefix_BT, samples.segments_BT, samples.mask_BT
    sample_device = samples.ids_B.device
    mask = torch.ones(len(samples.ids_B), tokens, tokens, dtype=torch.bool, device=sample_device)
    if causal:
        mask = mask.tril()
    if prefix_BT is not None:
        mask |= (prefix_BT[:, :, None] != 0) & (prefix_BT[:, None, :] != 0)
    if segments_BT is not None:
        mask &= segments_BT[:, :, None] == segments_BT[:, None, :]
    if mask_BT is not None:
        mask &= mask_BT[:, None, :] != 0
    mask |= torch.eye(tokens, dtype=torch.bool, device=sample_device)
    return mask[:, None].to(device)


def positions(samples: Samples | None, tokens: int, *, device: torch.device) -> Tensor:
    """Position of every token in its example: [T], or [B, T] where several are packed."""
    count_T = torch.arange(tokens, device=device if samples is None else samples.ids_B.device)
    if samples is None or samples.segments_BT is None:
        return count_T.to(device)
    segments_BT = samples.segments_BT
    starts_BT = torch.zeros_like(segments_BT, dtype=torch.int64)
    changed = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts_BT[:, 1:] = torch.where(changed, count_T[1:], 0)
    return (count_T - starts_BT.cummax(dim=1).values).to(device)

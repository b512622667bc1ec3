"""One step of a cut model against the whole one, bit for bit; packed examples against single ones.

Axes: B samples, T tokens, D width, V vocabulary, C classes.
"""

from itertools import pairwise

import torch
from torch import Tensor

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.stage import HuggingFaceStage, build_stage

_TOKENS = 16  # half of the second sequence is padding, so that masks count
_CLOSE = 1e-3
"""Of logits, in units of their spread; rounding gives 1e-6 to 1e-4, a wrong mask over 1e-2."""
_UNPACKED = "use packing = false"


def check_step(config: HuggingFaceConfig) -> None:
    """Compare logits and gradients of the model as it is and cut in up to three stages.

    Takes memory for two copies of the model, with gradients.

    Raises:
        ValueError: they differ; names the first tensor that does.
    """
    layers = config.layers
    bounds = sorted({0, layers // 3, 2 * layers // 3, layers})
    whole = [build_stage(config, 0, layers, seed=0, device="cpu")]
    cut = [build_stage(config, *ends, seed=0, device="cpu") for ends in pairwise(bounds)]
    expected, found = (_run(stages, config) for stages in (whole, cut))
    kind = config.transformers_config.model_type
    differing = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    if differing:
        name = differing[0]
        by = float((found[name] - expected[name]).abs().max())
        raise ValueError(
            f"model_type = {kind!r}, cut before layers {bounds[1:-1]}: {name} differs from the "
            f"whole model's by {by:.2g} ({len(differing)} of {len(found)} tensors differ); do not "
            "train it cut"
        )


@torch.no_grad()
def check_packed(config: HuggingFaceConfig) -> None:
    """Compare the logits of two examples in one sequence with those of each alone.

    Raises:
        ValueError: they differ, or the family does not take masks and positions of ours.
    """
    kind = config.transformers_config.model_type
    wrong = f"model_type = {kind!r}: packed examples are not computed as they are alone"
    stage = build_stage(config, 0, config.layers, seed=0, device="cpu").eval()
    ids_BT = _batch(config)[0][:1]
    first = ids_BT.shape[1] // 2 - 1
    segments_BT = torch.ones_like(ids_BT)
    segments_BT[:, first:] = 2
    alone = Samples(torch.tensor([0]))
    try:
        packed_TV = stage(ids_BT, Samples(alone.ids_B, segments_BT > 0, segments_BT))[0]
    except Exception as error:  # whatever a family does with a mask that it does not expect
        raise ValueError(f"{wrong} ({type(error).__name__}: {error}); {_UNPACKED}") from None
    expected_TV = torch.cat([stage(part, alone)[0] for part in ids_BT.tensor_split([first], 1)])
    by = float((packed_TV - expected_TV).abs().max() / expected_TV.std())
    if not by < _CLOSE:
        raise ValueError(f"{wrong}: logits differ by {by:.2g} of their spread; {_UNPACKED}")


def _run(stages: list[HuggingFaceStage], config: HuggingFaceConfig) -> dict[str, Tensor]:
    """Logits, and gradients by parameter, those of tied copies summed."""
    x, samples = _batch(config)
    ends = []
    for stage in stages:
        start = x.detach().requires_grad_(x.is_floating_point())
        x = stage.eval()(start, samples)
        ends.append((start, x))
    found = {"logits": x.detach()}
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    for start, end in reversed(ends):
        end.backward(gradient)
        if start.grad is not None:
            gradient = start.grad
    ties = config.ties_embeddings
    head = stages[-1].model.get_output_embeddings().weight if ties else None
    embedding = stages[0].model.get_input_embeddings().weight
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            # a copy of the embedding: its gradient is the rest of the embedding's
            if parameter.grad is not None and (parameter is not head or parameter is embedding):
                found[name] = parameter.grad
    if head is not None and head is not embedding and head.grad is not None:
        name = next(n for n, p in stages[0].model.named_parameters() if p is embedding)
        found[name] = found[name] + head.grad
    return found


def _batch(config: HuggingFaceConfig) -> tuple[Tensor, Samples]:
    generator = torch.Generator().manual_seed(0)
    tokens = min(_TOKENS, config.context)
    ids_BT = torch.randint(min(5, config.vocab - 1), config.vocab, (2, tokens), generator=generator)
    mask_BT = torch.ones(2, tokens, dtype=torch.int64)
    mask_BT[1, tokens // 2 :] = 0
    types_BT = (torch.arange(tokens) % 2).expand(2, tokens) if config.token_types > 1 else None
    return ids_BT, Samples(torch.arange(2), mask_BT, types_BT=types_BT)

"""What entropy coding would save of the weights and gradients that shards send each other.

    python -m benchmarks.shards.entropy --text train.txt --steps 300

Trains a byte-level decoder in this process, then codes its matrices as shards would: weights,
differences to what was last gathered, and the gradients of one batch. Compared are the entropy of
the codes, zstd and our rANS coder with a table per message, in bits per value, scales included.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Records, format_table
from benchmarks.replicas.settings import BYTES
from benchmarks.shards.fidelity import read_text
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.qsdp import is_kept, value_codec
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.pipeline.comm.payload import Rows, compress_codes
from thinpipe.pipeline.models.transformer import build_layers
from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.coding.entropy import compress
from thinpipe.pipeline.wire.kernels.reference.uniform import unpack

_BUCKET, _REMEMBERED_STEPS = 1024, 20
_Pairs = list[tuple[str, Tensor]]


def trained(samples: SampleSet, steps: int, bits: int) -> dict[str, _Pairs]:
    """After training: weights, differences in `bits` and gradients of all matrices, by name."""
    scale = BYTES.scale
    model = build_layers(scale.pretrained, 0, scale.layers, seed=0, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.pretrain_lr)
    sampler = EpochSampler(
        len(samples), batch_size=scale.pretrain_batch, replicas=1, replica=0, seed=0
    )
    memory: dict[str, Tensor] = {}
    for step in range(steps):
        batch = samples.batch(sampler.ids(step))
        logits = model(batch.inputs_BT, None).flatten(0, 1).float()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits, batch.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if step == steps - 1:
            break
        if step >= steps - _REMEMBERED_STEPS:
            for name, weight in _matrices(model):
                memory.setdefault(name, weight.clone())
                memory[name] += sent(weight - memory[name], bits, "shift", step)[0]
        optimizer.step()
    weights = _matrices(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "weights": weights,
        "differences": [(name, weight - memory[name]) for name, weight in weights],
        "gradients": [(name, gradients[name]) for name, _ in weights],
    }


def _matrices(model: nn.Module) -> _Pairs:
    named = model.named_parameters()
    return [(name, p.detach()) for name, p in named if not is_kept(p.shape, ShardsConfig())]


def sent(x: Tensor, bits: int, rounding: Any, step: int = 0) -> tuple[Tensor, Tensor, int]:
    """What is received of `x`, the message, and where its codes begin."""
    codec, x_1N = value_codec(bits, rounding, _BUCKET), x.reshape(1, -1)
    wire, seen = torch.zeros(1, codec.capacity(x.numel()), dtype=torch.uint8), x_1N.clone()
    codec.encode(x_1N, wire, seen, noise=Noise(1, step, torch.tensor([0])))
    return seen.view(x.shape), wire, wire.shape[1] - bits * -(-x.numel() // 8)


def measure(tensors: _Pairs, bits: int, rounding: Any) -> dict[str, float]:
    """Bits per value of all tensors together."""
    found = dict.fromkeys(("sent", "entropy", "zstd", "rans"), 0.0)
    for _, x in tensors:
        _, wire, split = sent(x, bits, rounding)
        code_N = unpack(wire[:, split:], bits, x.numel())[0].to(torch.uint8)
        share = torch.bincount(code_N.long(), minlength=2).double() / x.numel()
        entropy = float(-torch.xlogy(share, share).sum()) / torch.tensor(2.0).log().item()
        payload, room = wire[0], torch.empty_like(wire[0])
        rows = [Rows(1, len(payload), split, bits)]
        found["sent"] += 8 * len(payload)
        found["entropy"] += 8 * split + entropy * x.numel()
        found["zstd"] += 8 * (compress(payload, room) or len(payload))
        found["rans"] += 8 * (compress_codes(payload, room, rows) or len(payload))
    numel = sum(x.numel() for _, x in tensors)
    return {name: value / numel for name, value in found.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.shards.entropy", description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples, _ = read_text(options.text, BYTES.scale)
    records, rows = Records(options.json), []
    for bits in (4, 8):
        for kind, tensors in trained(samples, options.steps, bits).items():
            rounding = "stochastic" if kind == "gradients" else "shift"
            found = measure(tensors, bits, rounding)
            records.add({"kind": kind, "bits": bits, "steps": options.steps}, found)
            saved = 1 - found["rans"] / found["sent"]
            cells = [f"{value:.2f}" for value in found.values()]
            rows.append([kind, str(bits), *cells, f"{saved:.0%}"])
    print(format_table(("sent", "bits", "uncoded", "entropy", "zstd", "rANS", "saved"), rows))


if __name__ == "__main__":
    main()

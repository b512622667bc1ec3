"""Peak memory of a rank that holds its part of a GPT2-XL-shaped stage, at 1, 2 and 4 shards.

    python -m benchmarks.shards.memory --shards 1 2 4

Ranks are processes of this machine; each reports its own peak in training, over what it held when
torch was imported. A step is a forward and a backward of some blocks of width 1600, and AdamW.
"""

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import torch.distributed as dist

from benchmarks.harness import Records, format_table
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.stage import ShardedStage, StageShards
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.models.transformer import TransformerConfig, build_layers

_STATUS = Path("/proc/self/status")
Kind = Literal["step", "differences", "microbatch"]
SETTINGS: dict[Kind, dict[str, str]] = {
    "step": {},
    "differences": {"weights": "differences"},
    "microbatch": {"gather": "microbatch"},
}


def _megabytes(field: str) -> float:
    line = next(
        line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(field)
    )
    return int(line.split()[1]) / 1024


def _train(
    rank: int, shards: int, kind: Kind, model: TransformerConfig, first: int, folder: str
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=shards
    )
    before = _megabytes("VmRSS")
    transport = GlooTransport(1, 1, timeout_s=600, shards=shards)
    # without embedding and head, which are none of the blocks'
    stage = build_layers(model, first, model.layers - 1, seed=0, device="cpu")
    numel = sum(parameter.numel() for parameter in stage.parameters())
    run: torch.nn.Module = stage
    held: StageShards | None = None
    if shards > 1:
        sharded = ShardedStage(stage, stage.parts(), transport.shard_group)
        peers = transport.peers(transport.mesh.stage_shards, "shard")
        config = ShardsConfig.model_validate(
            {"method": "qsdp", "weight_rounding": "stochastic", **SETTINGS[kind]}
        )
        run, held = sharded, StageShards([sharded], peers, config, seed=rank)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here on
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-4)
    for step in range(3):  # differences begin with the second
        if held is not None:
            held.begin_step(step, 1)
        x = torch.randn(1, model.context, model.width, requires_grad=True)
        run(x, None).square().mean().backward()
        if held is not None:
            held.before_step()
        optimizer.step()
        optimizer.zero_grad()
    peak = _megabytes("VmHWM") - before
    Path(folder, f"{rank}").write_text(f"{peak} {numel}", encoding="utf-8")
    transport.close()
    dist.destroy_process_group()


def measure(shards: int, kind: Kind, model: TransformerConfig, first: int) -> tuple[float, int]:
    """The largest peak of a rank, in MiB, and the stage's parameters."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _train, args=(shards, kind, model, first, folder), nprocs=shards
        )
        found = [
            Path(folder, f"{rank}").read_text(encoding="utf-8").split() for rank in range(shards)
        ]
    return max(float(peak) for peak, _ in found), int(found[0][1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.shards.memory", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = TransformerConfig(
        layers=options.blocks + 2,
        width=options.width,
        heads=max(1, options.width // 64),
        context=options.tokens,
    )
    records, rows = Records(options.json), []
    for kind in options.kinds:
        for shards in options.shards:
            peak, numel = measure(shards, kind, model, 1)
            records.add({"shards": shards, "kind": kind, "parameters": numel}, {"MiB": peak})
            whole = 16 * numel / 2**20
            rows.append([kind, str(shards), f"{peak:.0f}", f"{whole:.0f}", f"{peak / whole:.2f}"])
    print(format_table(("weights", "shards", "peak MiB", "16 B x parameters", "ratio"), rows))


if __name__ == "__main__":
    main()

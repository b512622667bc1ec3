"""A step's numbers under the names that tools show: a group, a slash, a name."""

from thinpipe.launch.report.metrics import StepRecord


def scalars(record: StepRecord) -> dict[str, float]:
    """All numbers of a step; those of an evaluation and of `run.log` if there are any.

    Bytes are those of the step: across each cut and direction, between replicas and so on.
    """
    found: dict[str, float] = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/epoch": record.epoch,
        "train/skipped": float(record.skipped),
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/step_s": record.step_s,
        "speed/bubble": record.bubble,
        "bytes/replicas": record.sync_bytes,
        "bytes/control": record.control_bytes,
    }
    if record.grad_norm is not None:
        found["train/grad_norm"] = record.grad_norm
    if record.weight_bytes or record.gradient_bytes:
        found["bytes/shards_weights"] = record.weight_bytes
        found["bytes/shards_gradients"] = record.gradient_bytes
    for count in record.wire:
        place = f"cut_{count.cut}_{count.direction}"
        found[f"bytes/{place}"] = count.nbytes
        if count.error is not None:
            found[f"error/{place}"] = count.error
    found |= {f"eval/{name}": value for name, value in (record.eval or {}).items()}
    return found | {f"own/{name}": value for name, value in record.own.items()}

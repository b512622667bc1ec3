"""Who shared the samples of a run until when: a resumed run may have other replicas."""

from collections.abc import Callable, Sequence

from thinpipe.launch.checkpoint.manifest import Manifest
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.sampler import Change
from thinpipe.launch.data.streams.stream import Sampler
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.mesh import Mesh


def changes_before(
    manifest: Manifest, now: int, plan: Callable[[Mesh, Sequence[Change]], Sampler]
) -> list[Change]:
    """Who shared the samples until when, in the run that goes on with `now` DP ranks.

    `plan` makes the sampler of a mesh after some changes.
    """
    changes = [Change(*change) for change in manifest.meta.get("changes", ())]
    saved = manifest.meta["config"]
    pipeline = PipelineConfig.model_validate(saved["pipeline"])
    if pipeline.dp_size != now:
        mesh = Mesh(pipeline.pipeline_ranks, pipeline.replicas, 0, pipeline.shards)
        before, share = plan(mesh, changes), saved["train"]["batch_size"]
        steps = before.steps(saved["train"]["epochs"], saved["train"].get("max_steps"))
        changes.append(Change(manifest.step, pipeline.dp_size, share // pipeline.dp_size, steps))
    return changes


def words_of_change(
    changes: Sequence[Change],
    sampler: Sampler,
    config: RunConfig,
    steps: int,
) -> str:
    """How samples and steps go on after the last change, in a run of so many steps."""
    change, now = changes[-1], config.pipeline.dp_size
    epoch = sampler.epoch(change.step)
    rest = range(change.step, min(sampler.steps_of(epoch).stop, steps))
    left = sum(map(sampler.samples, rest))
    words = (
        f"samples go to {_count(now, 'replica')} in place of {change.replicas}: the "
        f"{_count(left, 'sample')} left of epoch {epoch + 1} take {_count(len(rest), 'step')}, "
        f"each sample once; the run has {_count(steps, 'step')} in place of {change.steps:,}"
    )
    if sampler.left_out:
        few = _count(sampler.left_out, "sample")
        words += f"; {few}, too few for all replicas, left out"
    if config.train.decay != "none":
        words += ", and the learning rate decays over them without a jump"
    return words


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"

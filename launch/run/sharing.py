"""Who shares the samples of a run until when, how many steps it has, and how far it has come.

A resumed run may have other replicas than before, and a run may lose some.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from thinpipe.launch.checkpoint.manifest import Manifest
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.sampler import Change, EpochSampler, paced
from thinpipe.launch.data.streams.stream import Sampler, StreamSampler, position
from thinpipe.pipeline.config import PipelineConfig
from thinpipe.pipeline.mesh import Mesh


class Plan:
    """The samples of this rank's steps: `sampler` chooses them, `steps` is how many there are."""

    def __init__(
        self, config: RunConfig, samples: SampleSet, mesh: Mesh, resumed: Manifest | None
    ) -> None:
        """`resumed` is the checkpoint that the run goes on from."""
        self._config, self._samples, self._mesh = config, samples, mesh
        self._share = config.train.batch_size // mesh.dp_size  # of a DP rank in a step
        self._changes: list[Change] = []
        if resumed is not None and position(samples) is None:
            self._changes = self._changes_before(resumed)
        self._set()
        self.first_steps = self._changes[0].steps if self._changes else self.steps
        """How many were planned at first."""

    @property
    def changed_at(self) -> int | None:
        """The step before which the number of DP ranks changed last."""
        return self._changes[-1].step if self._changes else None

    def pace(self, step: int) -> float:
        """As `paced`, of `first_steps`."""
        return paced(step, self._changes, self.steps)

    def share_anew(self, mesh: Mesh, done: int) -> None:
        """After `done` steps, what is left goes to the DP ranks of another mesh.

        Only how many there are before and after a step counts: of those in between, who were lost
        before they did one, some ranks never hear.
        """
        before = Change(done, self._mesh.dp_size, self._share, self.steps)
        if self.changed_at == done:
            before = self._changes.pop()
        if (mesh.dp_size, self._share) != (before.replicas, before.batch):
            self._changes.append(before)
        self._mesh = mesh
        self._set()

    @property
    def state(self) -> dict[str, Any]:
        """What a replica that joins has to know of it."""
        return {"changes": self._changes, "share": self._share}

    def take(self, state: Mapping[str, Any], mesh: Mesh) -> None:
        """Be at the same place as the plan of others, which are in this mesh."""
        self._changes = [Change(*change) for change in state["changes"]]
        self._mesh, self._share = mesh, state["share"]
        self._set()

    def facts(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """What a checkpoint says of the run, as JSON has it; `digests` are those of its samples."""
        shared = self._config.shared()
        facts = {"config": shared, "data": digests, "steps_per_epoch": self.sampler.steps_per_epoch}
        if self._changes:
            # the replicas there are now, and the batch that the run began with
            shared["pipeline"]["replicas"] = self._mesh.replicas
            shared["train"]["batch_size"] = self._share * self._mesh.dp_size
            whole = self.sampler.epoch(self._changes[-1].step) + 1
            facts["batch_size"] = self._config.train.batch_size
            facts["changes"] = self._changes
            facts["whole_epochs"] = whole, self.sampler.steps_of(whole).start
        plain: dict[str, Any] = json.loads(json.dumps(facts))
        return plain

    def words(self) -> str:
        change, now = self._changes[-1], self._mesh.dp_size
        size, before = now * self._share, change.replicas * change.batch
        epoch = self.sampler.epoch(change.step)
        rest = range(change.step, min(self.sampler.steps_of(epoch).stop, self.steps))
        left = sum(map(self.sampler.samples, rest))
        shared = [f"samples go to {_count(now, 'replica')} in place of {change.replicas}"]
        if now == change.replicas:
            shared = []
        if size != before:
            shared.append(f"a step takes {_count(size, 'sample')} in place of {before}")
        words = (
            f"{', '.join(shared)}: the "
            f"{_count(left, 'sample')} left of epoch {epoch + 1} take {_count(len(rest), 'step')}, "
            f"each sample once; the run has {_count(self.steps, 'step')}"
        )
        if self.steps != change.steps:
            words += f" in place of {change.steps:,}"
        if self.sampler.left_out:
            few = _count(self.sampler.left_out, "sample")
            words += f"; {few}, too few for all replicas, left out"
        if self._config.train.decay != "none":
            words += ", and the learning rate decays over them without a jump"
        return words

    def _set(self) -> None:
        train = self._config.train
        self.sampler = self._sampler(self._mesh, self._share, self._changes)
        self.steps = self.sampler.steps(train.epochs, train.max_steps)

    def _changes_before(self, resumed: Manifest) -> list[Change]:
        changes = [Change(*change) for change in resumed.meta.get("changes", ())]
        saved = resumed.meta["config"]
        pipeline = PipelineConfig.model_validate(saved["pipeline"])
        share = saved["train"]["batch_size"] // pipeline.dp_size
        if (pipeline.dp_size, share) == (self._mesh.dp_size, self._share):
            return changes
        mesh = Mesh(pipeline.pipeline_ranks, pipeline.replicas, 0, pipeline.shards)
        before = self._sampler(mesh, share, changes)
        steps = before.steps(saved["train"]["epochs"], saved["train"].get("max_steps"))
        return [*changes, Change(resumed.step, pipeline.dp_size, share, steps)]

    def _sampler(self, mesh: Mesh, share: int, changes: Sequence[Change]) -> Sampler:
        size, replicas, replica = share * mesh.dp_size, mesh.dp_size, mesh.dp_rank
        stream = position(self._samples)
        if stream is not None:
            return StreamSampler(stream, batch_size=size, replicas=replicas, replica=replica)
        return EpochSampler(
            len(self._samples),
            batch_size=size,
            replicas=replicas,
            replica=replica,
            seed=self._config.run.seed,
            shuffle=getattr(self._samples, "shuffle", True),  # which only those of one's own say
            changes=changes,
            alike=mesh.shards > 1,
            masks=not self._config.model.is_own,
        )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"

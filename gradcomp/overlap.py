"""An exchange under way, on a thread of its own, in parallel with training.

What it found is applied by the training thread, which may wait for it now or some steps later. A
checkpoint made meanwhile can hold what was found. Then it must hold, too, what a method keeps of an
exchange whose job has ended.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from thinpipe.pipeline.comm.transport import LANES
from thinpipe.pipeline.wire.stream import CudaEvent, SideStream
from thinpipe.pipeline.wire.thread import Worker

_KEY = "under_way"
_ALL = -1
"""The lane of what waits for all others."""
_END_S = 120.0  # for a job whose connections are broken: it encodes to its end


class Overlap:
    """Jobs that exchange; those of a lane in the order in which they were launched.

    What a job returns is a tensor, or lists and tuples of what a checkpoint can hold. After a
    failure every call that waits raises it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[int, tuple[Worker, SideStream]] = {}
        self._side_stream = SideStream(device)  # of the thread that calls
        self._jobs: list[Future[tuple[Any, CudaEvent]]] = []

    def launch(self, job: Callable[[], Any], lane: int = 0) -> None:
        """Run `job` after those before it in its lane, and after what is queued on the device."""
        worker, stream = self._lane(lane)
        self._jobs.append(worker.submit(_after_queue(stream, job)))

    def launch_each(
        self, jobs: Sequence[Callable[[], Any]], combine: Callable[[list[Any]], Any] = list
    ) -> None:
        """Run the jobs of buckets 0, 1, ..., each in its lane, as one job, which fails when all are
        over if one did. `combine` makes one result of theirs.
        """
        lanes = [self._lane(number % LANES) for number in range(len(jobs))]
        each = [
            (worker, _after_queue(stream, job))
            for (worker, stream), job in zip(lanes, jobs, strict=True)
        ]
        all_worker, all_stream = self._lane(_ALL)

        def all_of_them() -> Any:
            found = [worker.submit(job) for worker, job in each]
            wait(found)
            results = [future.result() for future in found]
            for _, finished in results:
                all_stream.wait(finished)
            return combine([value for value, _ in results])

        self._jobs.append(all_worker.submit(_after_queue(all_stream, all_of_them)))

    def _lane(self, lane: int) -> tuple[Worker, SideStream]:
        if lane not in self._lanes:
            self._lanes[lane] = Worker("gradcomp"), SideStream(self._device)
        return self._lanes[lane]

    @property
    def is_empty(self) -> bool:
        """Whether all was taken or forgotten."""
        return not self._jobs

    def wait(self) -> None:
        """Until nothing is under way: what jobs read may be changed then."""
        for job in self._jobs:
            job.result()

    def join(self) -> list[Any]:
        """Wait for all jobs, and take what they found."""
        found = [job.result() for job in self._jobs]
        self._jobs.clear()
        for value, finished in found:
            for leaf in tree_leaves(value) if finished is not None else ():
                if isinstance(leaf, Tensor):
                    self._side_stream.hand_over(leaf, finished)
        return [value for value, _ in found]

    def settle(self) -> None:
        """Wait until nothing is under way, whatever came of it.

        Raises:
            TimeoutError: a job goes on.
        """
        for job in self._jobs:
            job.exception(_END_S)

    def abandon(self) -> None:
        """Settle, and forget all. Threads end: one that has failed keeps all that its job used."""
        self.settle()
        for worker, _ in self._lanes.values():
            worker.stop(0.0)
        self._lanes.clear()
        self._jobs.clear()

    def save(self) -> dict[str, Any]:
        """A result that was not joined, for `state_dict`."""
        found = [job.result() for job in self._jobs]
        for _, finished in found:
            self._side_stream.wait(finished)
        return {_KEY: [value for value, _ in found]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Have under way what `save` returned.

        Raises:
            ValueError: the state was saved by a version that made an exchange again.
        """
        if not isinstance(state.get(_KEY), list):
            raise ValueError(
                "this checkpoint holds an exchange between replicas in the form of an earlier "
                "version; go on from it with that version, or start with model.from_run"
            )
        self.wait()
        self._jobs = []
        for value in state[_KEY]:
            job: Future[tuple[Any, CudaEvent]] = Future()
            here = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), value)
            job.set_result((here, self._side_stream.now()))
            self._jobs.append(job)


def _after_queue(stream: SideStream, job: Callable[[], Any]) -> Callable[[], tuple[Any, CudaEvent]]:
    """The job after what is queued on the device now, and what tells when it is done there."""
    queued = stream.now()

    def run() -> tuple[Any, CudaEvent]:
        with stream.after(queued):
            return job(), stream.now()

    return run

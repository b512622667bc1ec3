"""Runs a function as several ranks that talk over loopback.

Workers come from a fork server that has torch and our packages loaded, so starting four takes well
under a second. A worker's exception is raised in the test, with the worker's traceback.
"""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from thinpipe.launch.net.ranks.fork_server import PRELOADED

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(  # what each rank would import: pytest alone is half its time
    [
        "tests.cold",
        *PRELOADED,
        "transformers.modeling_utils",
        "hypothesis",
        "pytest",
        "tests.commands",
        "tests.training",
        "tests.warm",
    ]
)


def run_ranks(
    count: int, function: Callable[..., Any], *args: Any, limit_s: float = 300
) -> list[Any]:
    """Call `function(rank, *args)` in `count` processes that share a group; return the results."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(count)]
    workers = [
        CONTEXT.Process(target=_work, args=(rank, count, store.port, pipe[1], function, args))
        for rank, pipe in enumerate(pipes)
    ]
    try:
        for worker, (_, sending_end) in zip(workers, pipes, strict=True):
            worker.start()
            sending_end.close()  # so that a worker that dies reads as the end of its pipe
        results = [_result(rank, pipe[0], limit_s) for rank, pipe in enumerate(pipes)]
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.join(2)
            if worker.is_alive():
                worker.kill()
            worker.join()
        del store
    failed = [text for ok, text in results if not ok]
    if failed:
        raise AssertionError("\n".join(failed))
    return [value for _, value in results]


def _result(rank: int, pipe: Any, limit_s: float) -> tuple[bool, Any]:
    if not pipe.poll(limit_s):
        return False, f"rank {rank}: nothing after {limit_s} s"
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, f"rank {rank}: ended without a result"
    return ok, value


def _work(
    rank: int, count: int, port: int, pipe: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120)
        )
        store.set(f"connected/{rank}", "")  # nobody leaves while another still connects
        store.wait([f"connected/{other}" for other in range(count)])
        outcome = (True, function(rank, *args))
    except BaseException:
        outcome = (False, f"rank {rank}:\n{traceback.format_exc()}")
    pipe.send_bytes(pickle.dumps(outcome))  # copies tensors; multiprocessing would share them
    if not outcome[0]:
        os._exit(1)
    dist.barrier()
    os._exit(0)  # fork server children skip the slow interpreter shutdown

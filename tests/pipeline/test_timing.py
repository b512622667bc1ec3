"""Marks are read as moments of `time.perf_counter`, in order, on any device."""

import time

import pytest
import torch

from thinpipe.pipeline.timing import Stopwatch


def test_marks_are_moments_of_the_clock() -> None:
    watch = Stopwatch(torch.device("cpu"))
    before_s = time.perf_counter()
    marks = [watch.mark() for _ in range(3)]
    moments_s = watch.seconds(marks)
    assert before_s <= moments_s[0] <= moments_s[1] <= moments_s[2] <= time.perf_counter()
    assert watch.seconds([]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_on_a_gpu_is_timed_when_it_runs() -> None:
    device = torch.device("cuda", 0)
    watch, work = Stopwatch(device), torch.zeros(8192, 8192, device=device)
    torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    begin = watch.mark()
    for _ in range(50):
        work = work @ work
    end = watch.mark()
    told_s = time.perf_counter()
    begun_s, ended_s = watch.seconds([begin, end])
    assert start_s - 0.01 < begun_s < told_s < ended_s < time.perf_counter()

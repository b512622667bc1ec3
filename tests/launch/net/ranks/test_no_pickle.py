"""Nothing that comes over a network is unpickled, in torch's part of the path either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import PATIENCE_S
from tests.launch.test_train import run_file
from tests.ports import free_port

__all__ = ["run_file"]

WATCH = """
import os, pickle, sys

LOG = os.environ["UNPICKLED"]

def watched(function):
    def load(*arguments, **options):
        with open(LOG, "a") as file:
            file.write(sys._getframe(1).f_code.co_filename + "\\n")
        return function(*arguments, **options)
    return load

pickle.load, pickle.loads = watched(pickle.load), watched(pickle.loads)

class Unpickler(pickle.Unpickler):
    def __init__(self, *arguments, **options):
        with open(LOG, "a") as file:
            file.write(sys._getframe(1).f_code.co_filename + "\\n")
        super().__init__(*arguments, **options)

pickle.Unpickler = Unpickler
"""
"""Imported by every Python process when it starts: says which files unpickle anything."""

LOCAL = ("/multiprocessing/", "/numba/", "/wire/kernels/cpu/compilation.py")
"""Pipes between processes of one machine, by which torch and Python start ranks; our kernels."""


@pytest.mark.dist
@pytest.mark.slow
def test_two_machines_unpickle_nothing_of_each_other(run_file: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "site", tmp_path / "unpickled"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WATCH)
    environment = {**os.environ, "PYTHONPATH": str(folder), "UNPICKLED": str(log)}
    command = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(run_file)]
    command += ["--set", "pipeline.cuts=[2]", "--nnodes", "2", "--rdzv", f"127.0.0.1:{free_port()}"]
    nodes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        texts = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], texts
    files = set(log.read_text(encoding="utf-8").split())
    assert any(place in name for name in files for place in LOCAL)  # the watch works
    assert not [name for name in files if not any(place in name for place in LOCAL)]

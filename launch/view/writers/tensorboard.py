"""TensorBoard: event files in the run folder's `tensorboard`.

tensorboard's own writer has a thread that dies loudly on a full disk; ours has one already.
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from thinpipe.launch.view.writers.writer import Destination


class TensorBoardWriter:
    """Steps after those that are done, which may be there from before a resume, are replaced."""

    def __init__(self, place: Destination) -> None:
        protocol: Any = import_module("tensorboard.compat.proto.event_pb2")
        records: Any = import_module("tensorboard.summary.writer.record_writer")
        folder = place.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # the name sorts by time, so that a resume is read after what it goes on with
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._event, session = protocol.Event, protocol.SessionLog
        self._file = (folder / name).open("wb")
        self._records = records.RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        if place.done:
            self._add(step=place.done + 1, session_log=session(status=session.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        shown = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._add(step=step, summary={"value": shown})

    def close(self) -> None:
        self._file.close()

    def _add(self, **event: Any) -> None:
        written = self._event(wall_time=time.time(), **event)
        try:
            self._records.write(written.SerializeToString())
            self._file.flush()
        except OSError:
            with suppress(OSError):  # what is left is written to where there is no room
                self._file.close()
            raise


open_writer = TensorBoardWriter

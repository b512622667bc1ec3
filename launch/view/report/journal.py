"""What a run tells besides its steps: who is where, what happened, what its connections do now.

`state.json` is replaced as a whole, `notes.jsonl` only grows. Their reader is another process.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypedDict

from thinpipe.launch.host import disk
from thinpipe.launch.view.report.edge_trace import EdgeSample
from thinpipe.launch.view.report.edges import Edge, Traces, edges_of, read_edges, traces_of
from thinpipe.launch.view.report.metrics import RunInfo

STATE, NOTES, METRICS = "state.json", "notes.jsonl", "metrics.jsonl"
PERIOD_S = 5.0  # the whole state is written anew each time
_STALE, _SILENT_S = 4, 1.0  # periods: of a process that hangs or is gone; two heartbeats
_LATE_S = 15.0  # what another host has said is no news any more: it says it every 5 s
UP = "up"
GONE_S = 10.0
"""So long no step has come, before the lock of a folder says that nobody trains there."""
_GONE = "its process is gone, and did not say why"
_MOST_WORDS = 200  # letters of an error's first line
_MOST_NAMED = 6  # runs in a folder that is none, in one message
Kind: TypeAlias = Literal["note", "warning", "sample"]


class Place(TypedDict):
    """Where a rank runs, and its part of the model."""

    rank: int
    host: str
    stages: list[int]
    replica: int
    shard: int


class Note(TypedDict):
    """A message, `at_s` seconds after the epoch, once `step` steps were done."""

    at_s: float
    step: int
    kind: Kind
    text: str


class Journal:
    """Writes the state; a context manager around training.

    `hosts` says what the connections of hosts did so far, of each that is known and has any. A
    thread asks it every few seconds, as what is worth knowing is a silence during which no step
    ends.
    """

    def __init__(
        self,
        info: RunInfo,
        places: Sequence[Place],
        hosts: Callable[[], Sequence[dict[str, Any] | None]] = tuple,
    ) -> None:
        self._info, self._places, self._hosts = info, places, hosts
        self._known: list[dict[str, Any]] = []
        self.why = ""
        """Why the run ends before its last step, if it does without an error."""
        self._over, self._writes = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def tell(self, info: RunInfo, places: Sequence[Place]) -> None:
        """The run has another plan, or other ranks, from here on."""
        self._info, self._places = info, places
        self.write()

    def write(self, ended: str | None = None) -> bool:
        """Replace the state by that of now; False if there are no connections to follow.

        With `ended` it is the last one: why the run ended, "" where nothing is known.
        """
        with self._writes:
            _replace(self._info.folder, self.state(ended))
        return bool(self._known)

    def state(self, ended: str | None = None) -> dict[str, Any]:
        known = [host for host in self._hosts() if host is not None]
        known = self._known = known or self._known  # at the end, those that there were
        return {
            "info": _info_as_json(self._info),
            "places": self._places,
            "edges": edges_of(known),
            "traces": traces_of(known),
            "now": [now for host in known for now in _now(host)] if ended is None else [],
            "ended": ended,
        }

    def _follow(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.write()

    def __enter__(self) -> Self:
        if self.write():
            self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD_S)
        self.write(ended=_reason(error) or self.why)


def add_note(folder: Path, text: str, step: int, kind: Kind | None = None) -> None:
    """Append a message; a full disk loses it, as it does lines of a log."""
    kind = kind or ("warning" if text.startswith("warning") else "note")
    line = json.dumps(Note(at_s=round(time.time(), 1), step=step, kind=kind, text=text))
    with suppress(OSError), (folder / NOTES).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def silent_s(folder: Path) -> float:
    """For how long no step has been recorded."""
    with suppress(OSError):
        return max(0.0, time.time() - _changed_s(folder / METRICS))
    return 0.0


def is_gone(folder: Path, patience_s: float = GONE_S) -> bool:
    """Whether no process trains in a folder, and `patience_s` have passed without a step.

    Only the machine that trained there can tell: elsewhere a lock may not be seen.
    """
    if silent_s(folder) < patience_s or disk.is_locked(folder / disk.RUN_LOCK) is not False:
        return False
    owner = disk.run_owner(folder)
    return owner is not None and owner.host == socket.gethostname()


def is_starting(folder: Path) -> bool:
    """Whether a process has begun a run in a folder, and written nothing yet."""
    return not (folder / STATE).exists() and disk.is_locked(folder / disk.RUN_LOCK) is True


def retell(folder: Path, why: str) -> None:
    """A run that has ended did so for another reason, which was learnt afterwards."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["ended"] is not None:
            _replace(folder, {**state, "ended": _line(why)})


class Told:
    """What the two files of a folder say; a `given` state stands in for the first.

    Of a run that was killed no file says that it ended, but the lock of its folder (`is_gone`).

    Raises:
        ValueError: `state.json` is none, or damaged.
    """

    def __init__(self, folder: Path, given: Any = None, *, patience_s: float = GONE_S) -> None:
        try:
            state = given or json.loads((folder / STATE).read_text(encoding="utf-8"))
            self.info = _info_of(state["info"], folder)
            self.places: list[Place] = _all_with(Place, state["places"])
            self.edges: list[Edge] = _all_with(Edge, state["edges"])
            self.traces: Traces = {
                str(host): _all_with(EdgeSample, own) for host, own in state["traces"].items()
            }
            self.ended: str | None = state.get("ended")
            if self.ended is None and is_gone(folder, patience_s):
                self.ended = _GONE
            self.now = [(str(a), str(b), str(word)) for a, b, word in state["now"]]
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{folder}: {_no_run(folder)}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder / STATE}: not the state of a run ({error}); `thinpipe report {folder}` "
                "writes it again"
            ) from None
        edges, traces = read_edges(folder)  # of all hosts, once a run has ended
        written_s = 0.0 if given else _changed_s(folder / STATE)
        reported_s = _changed_s(folder / "summary.json") if edges else 0.0
        if edges and (self.ended is not None or reported_s >= written_s - PERIOD_S):
            self.edges, self.traces = edges, traces
        if time.time() - written_s > _STALE * PERIOD_S or self.ended is not None:
            self.now = []


def read_notes(folder: Path) -> list[Note]:
    """The last messages; damaged lines are left out."""
    found: list[Note] = []
    with suppress(OSError):
        for line in (folder / NOTES).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                note = json.loads(line)
                if isinstance(note, dict) and note.keys() == Note.__required_keys__:
                    found.append(note)  # type: ignore[arg-type]
    return found[-500:]


def _now(host: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    age_s = host.get("age_s", 0.0)
    rates = {sample["target"]: sample["sent_Bps"] for sample in host["trace"]}  # the last of each
    return [
        (
            host["name"],
            peer,
            f"no news for {age_s:.0f} s" if age_s > _LATE_S else _state_of(link, rates.get(peer)),
        )
        for peer, link in host["links"].items()
    ]


def _state_of(link: Mapping[str, Any], rate_Bps: float | None) -> str:
    if link.get("left"):
        return "has left"
    if link.get("lost") or not link.get("connected", True):
        return f"lost for {link.get('silence_s', 0.0):.0f} s"
    silence_s = link.get("silence_s", 0.0)
    if silence_s > _SILENT_S:
        return f"silent for {silence_s:.0f} s"
    return UP if rate_Bps is None else f"{UP}, {8e-6 * rate_Bps:.1f} Mbit/s"


def _reason(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    return text.partition("\n")[0][:_MOST_WORDS]


def _replace(folder: Path, state: Mapping[str, Any]) -> None:
    partial = folder / f".{STATE}.partial"
    with suppress(OSError):
        partial.write_text(json.dumps(state), encoding="utf-8")
        disk.replace(partial, folder / STATE)


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder; name that of a run (run.folder in its file, or runs/NAME)"
    if runs := sorted(file.parent.name for file in folder.glob(f"*/{STATE}")):
        named = ", ".join(runs[:_MOST_NAMED]) + ", ..." * (len(runs) > _MOST_NAMED)
        return f"is not a run's folder; it contains the runs {named}: name one or more"
    if (folder / METRICS).exists():
        return (
            f"holds no {STATE}: an earlier version trained it; run `thinpipe report {folder}` once "
            "(of a copy, if it is read-only)"
        )
    return f"holds no {STATE}, so it is no run's folder, or its run has not begun"


def _all_with(kind: Any, items: Sequence[Any]) -> list[Any]:
    """Objects that a file holds, each with the fields of a kind; another version has others."""
    for item in items:
        if missing := sorted(kind.__required_keys__ - dict(item).keys()):
            raise ValueError(f"{kind.__name__} without {', '.join(missing)}")
    return list(items)


def _changed_s(path: Path) -> float:
    return path.stat().st_mtime


def _info_as_json(info: RunInfo) -> dict[str, Any]:
    methods = [[*key, label] for key, label in info.methods.items()]
    return {**asdict(info), "folder": str(info.folder), "methods": methods}


def _info_of(found: Mapping[str, Any], folder: Path) -> RunInfo:
    methods = {(cut, way): label for cut, way, label in found["methods"]}
    return RunInfo(**{**found, "folder": folder, "methods": methods, "cuts": tuple(found["cuts"])})

"""A package imports only what stands to its left, without cycles, and cheaply."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("pipeline", "aqsgd", "gradcomp", "launch")
WIRE = "thinpipe.pipeline.wire"
CONTRACTS = {
    f"thinpipe.pipeline.{name}" for name in ("comm.errors", "comm.transport", "replica_sync")
}
"""What a method is called by, and what it calls."""
ALLOWED = {
    WIRE: {WIRE},
    "thinpipe.pipeline": {WIRE, "thinpipe.pipeline"},
    "thinpipe.aqsgd": {WIRE, "thinpipe.pipeline", "thinpipe.aqsgd"},
    "thinpipe.gradcomp": {WIRE, "thinpipe.gradcomp", *CONTRACTS},
    "thinpipe.launch": {WIRE, *(f"thinpipe.{top}" for top in TOPS)},
}
MOST_FILES = 16
"""Of a folder, beside `__init__.py`."""


def package_of(module: str) -> str:
    if module == WIRE or module.startswith(f"{WIRE}."):
        return WIRE
    return ".".join(module.split(".")[:2])


@functools.cache
def modules() -> Mapping[str, Path]:
    found = {}
    for top in TOPS:
        for path in (ROOT / top).rglob("*.py"):
            parts = ("thinpipe", *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for part in ("", ".__main__"):  # the folder of what lies at the top
        found[f"thinpipe{part}"] = found.pop(f"thinpipe.launch.api{part}")
    return found


@functools.cache
def _named(path: Path, *, at_import: bool) -> frozenset[tuple[str, str]]:
    """Modules and names that a file imports from them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.iter_child_nodes(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return frozenset(found)


def imports(path: Path, known: Mapping[str, Path], *, at_import: bool) -> set[str]:
    """Our modules that a file imports; `at_import` leaves out imports inside functions."""
    named = _named(path, at_import=at_import)
    whole = {(module, f"{module}.{name}") for module, name in named}
    return {name if name in known else module for module, name in whole} & known.keys()


def test_packages_import_only_what_stands_to_their_left() -> None:
    known = modules()
    for module, path in known.items():
        if module != "thinpipe":
            for name in imports(path, known, at_import=False):
                allowed = ALLOWED[package_of(module)]
                assert {name, package_of(name)} & allowed, f"{module} imports {name}"


def test_there_are_no_import_cycles() -> None:
    known = modules()
    graph = {name: imports(path, known, at_import=True) for name, path in known.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("top", TOPS)
def test_there_are_no_cycles_between_folders(top: str) -> None:
    """A folder is a room: what imports it is above it, whichever files are meant."""
    inside = {m: path for m, path in modules().items() if m.startswith(f"thinpipe.{top}.")}
    graph: dict[str, set[str]] = {}
    for module, path in inside.items():
        names = imports(path, inside, at_import=False)
        room, *others = (name.split(".")[2] for name in (module, *names))
        graph.setdefault(room, set()).update({*others} - {room})
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_what_tests_import_exists() -> None:
    """A fork server leaves out, silently, what it is to load and cannot."""
    known = modules()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinpipe"):
                assert node.module in known, f"{path} imports {node.module}"


def test_folders_are_small() -> None:
    files = (path for path in modules().values() if path.name != "__init__.py")
    sizes = Counter(path.parent for path in files)
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_FILES} == {}


CEILINGS = {
    "thinpipe.launch.cli": 13,
    "thinpipe.launch.config.run": 39,
    "thinpipe.launch.rank": 160,
    "thinpipe.launch.run.run": 156,
    "thinpipe.launch.start": 122,
}
"""Of our modules that an import leads to; lower one whenever that is reached."""


def closure(start: str) -> set[str]:
    """All of our modules that are imported if one is."""
    known, found, left = modules(), {start}, [start]
    while left:
        name = left.pop()
        new = imports(known[name], known, at_import=True) - found
        found |= new
        left += new
    return found


def test_closures_of_imports_stay_below_their_ceilings() -> None:
    for start, most in CEILINGS.items():
        size = len(closure(start))
        assert size <= most, f"{start} imports {size} of our modules"


def test_what_is_built_from_a_config_knows_only_its_own_settings() -> None:
    known = modules()
    for name in closure("thinpipe.launch.build") - {"thinpipe.launch.build"}:
        if not name.startswith("thinpipe.launch.config."):
            reads = imports(known[name], known, at_import=False)
            assert "thinpipe.launch.config.run" not in reads, name


MOST_ROOMS, MOST_ARROWS, MOST_FLOORS = 14, 60, 8
"""Folders of launch, imports between them, and how many lie on each other; its loose files count as
one more room, but on no floor: some are the ground, some the roof.
"""


def test_few_rooms_of_launch_import_each_other() -> None:
    def room(module: str) -> str:
        name = module.split(".")[2]
        return name if (ROOT / "launch" / name).is_dir() else ""

    inside = {m: path for m, path in modules().items() if m.startswith("thinpipe.launch.")}
    arrows = {
        (room(module), room(name))
        for module, path in inside.items()
        for name in imports(path, inside, at_import=False)
        if room(name) != room(module)
    }
    assert len({room(module) for module in inside} - {""}) <= MOST_ROOMS
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)
    below: dict[str, set[str]] = {}
    for above, under in arrows:
        if above and under:
            below.setdefault(above, set()).add(under)
    floors: dict[str, int] = {}
    for name in TopologicalSorter(below).static_order():
        floors[name] = 1 + max((floors[under] for under in below.get(name, ())), default=0)
    assert max(floors.values()) <= MOST_FLOORS, floors


LEAVES = ("plan", "doctor", "starter", "lab", "start_hosts", "view.watch")


def test_leaves_are_imported_by_the_command_table_alone() -> None:
    """Nothing that trains reaches what plans, checks, writes or emulates, not even in functions."""
    known = modules()
    for leaf in (f"thinpipe.launch.{name}" for name in LEAVES):
        for name, path in known.items():
            if name != "thinpipe.launch.cli" and not name.startswith(f"{leaf}."):
                reached = [i for i in imports(path, known, at_import=False) if i.startswith(leaf)]
                assert not reached, f"{name} imports {reached}"


SHOWN = ("pipeline.wire.told",)
MESSAGES = ("pipeline.comm", "pipeline.mesh", "pipeline.wire")
SETTINGS = tuple(
    f"launch.config.{name}" for name in ("cli_options", "network", "placement", "toml")
)
ROOMS = {
    ("host",): ("pipeline.models.paths", "pipeline.precision", "pipeline.wire.kernels.cpu.kept"),
    ("view",): SHOWN,
    ("net",): (*MESSAGES, *SETTINGS, "gradcomp.methods", "pipeline.models.paths"),
}
"""Rooms of launch, and what they may import beside themselves and `host`."""


@pytest.mark.parametrize("rooms", ROOMS)
def test_what_shows_and_what_connects_know_no_settings_of_models(rooms: tuple[str, ...]) -> None:
    """But for their commands."""
    known = modules()
    own = tuple(f"thinpipe.launch.{room}" for room in rooms)
    allowed = (*own, *(f"thinpipe.{name}" for name in ("launch.host", *ROOMS[rooms])))
    for module, path in known.items():
        if module.startswith(own) and not module.endswith(".cli"):
            beyond = [n for n in imports(path, known, at_import=False) if not n.startswith(allowed)]
            assert not beyond, f"{module} imports {beyond}"


CHEAP = [
    "thinpipe",
    *ALLOWED,
    "thinpipe.pipeline.wire.uniform",
    "thinpipe.pipeline.comm.boundary",
    "thinpipe.pipeline.comm.channel",
    "thinpipe.aqsgd.delta",
    "thinpipe.pipeline.wire.subset",
    "thinpipe.pipeline.wire.sparse",
]


def test_importing_is_cheap_and_what_trains_does_not_load_what_draws_or_reads_tables() -> None:
    heavy = "{'triton', 'numba', 'torch.distributed.pipelining'} & set(sys.modules)"
    code = "".join(f"import {name}\nassert not {heavy}, ('{name}', {heavy})\n" for name in CHEAP)
    drawing = "{'matplotlib', 'datasets', 'pandas', 'pyarrow', 'tokenizers'}"
    code += f"import thinpipe.launch.start\nassert not {drawing} & set(sys.modules)\n"
    code += "from thinpipe.launch.host.device import cache_notice\n"
    code += "cache_notice('cpu')\nassert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"import sys\n{code}"], check=True, cwd=ROOT)


def test_package_files_hold_only_a_docstring() -> None:
    for name, path in modules().items():
        if path.name == "__init__.py" and name not in ("thinpipe", f"{WIRE}.kernels"):
            (docstring,) = ast.parse(path.read_text(encoding="utf-8")).body
            assert isinstance(docstring, ast.Expr), path


def test_every_package_is_in_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    folders = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(listed) == folders


def _hazards(path: Path) -> list[str]:
    """Ways to start threads inside kernels or to fork; after either, the other aborts or hangs."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "parallel":
            found.append("parallel=")
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found += [name] if name in ("prange", "fork", "forkpty") else []
        elif isinstance(node, ast.Constant) and node.value in ("fork", "omp", "workqueue"):
            found.append(repr(node.value))
    return found


def test_no_kernel_starts_threads_and_nothing_forks() -> None:
    # their children are made before any thread
    fork_first = (
        "thinpipe.launch.lab",
        "thinpipe.launch.net.ranks.supervisor",
        "thinpipe.launch.host.signals",
    )
    checked = {m: path for m, path in modules().items() if not m.startswith(fork_first)}
    assert {module: _hazards(path) for module, path in checked.items() if _hazards(path)} == {}


TRANSPORT = ("isend", "irecv", "send", "recv", "all_reduce", "all_gather", "barrier", "broadcast")


def test_only_the_transport_talks_to_other_ranks() -> None:
    """Whatever else leaves a rank would escape its checks, deadlines and errors."""
    own = {f"thinpipe.pipeline.comm.{name}" for name in ("gloo", "gloo_link")}
    found = {
        (module, node.attr)
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in TRANSPORT
        if isinstance(node.value, ast.Name) and node.value.id == "dist"
    }
    assert {place for place in found if place[0] not in own} == set()
    assert {name for _, name in found} == {"isend", "irecv"}

"""Whether the run folder's disk has room for a checkpoint, before anything is trained."""

from collections.abc import Sequence
from pathlib import Path

from thinpipe.launch.checkpoint import files
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host import disk
from thinpipe.launch.host.words import format_bytes


def check_space(run_folder: Path, parts: Sequence[int], memories: int = 0) -> None:
    """Check that a checkpoint fits; `parts` are the bytes that each rank on this host saves.

    `memories` are the bytes of the activation cache on the same disk.

    Raises:
        ConfigError: it does not fit, or a part is larger than a file may be.
    """
    folder, nbytes = disk.existing(run_folder), sum(parts)
    free, limit = disk.free_nbytes(folder), disk.file_size_limit()
    if nbytes + memories > free:
        cache = f" next to {format_bytes(memories)} of activation cache" if memories else ""
        raise ConfigError(
            f"run.folder = {run_folder}: a checkpoint takes {format_bytes(nbytes)}{cache}, "
            f"but {folder} has {format_bytes(free)} free; free disk space, or name a folder on a "
            "larger disk"
        )
    if limit is not None and max(parts, default=0) > limit:
        raise ConfigError(
            f"`ulimit -f` allows files of {format_bytes(limit)}, but a rank saves "
            f"{format_bytes(max(parts))} in one; raise it (`ulimit -f unlimited`)"
        )
    if not disk.has_inodes(folder):
        raise ConfigError(
            f"run.folder = {run_folder}: its file system has no inodes left; remove files, "
            "however small, or name a folder on another disk"
        )


def space_notices(run_folder: Path, keep: int, parts: Sequence[int]) -> list[str]:
    """A notice if one checkpoint fits, but not as many as are kept."""
    lacking = keep + 1 - len(files.steps(run_folder / "checkpoints"))
    folder, need = disk.existing(run_folder), lacking * sum(parts)
    free = disk.free_nbytes(folder)
    if need <= free:
        return []
    return [
        f"note: checkpoint.keep = {keep}: those still to come and one being "
        f"written take {format_bytes(need)}, but {folder} has {format_bytes(free)} free; saving "
        "will fail unless you free some, or lower checkpoint.keep"
    ]

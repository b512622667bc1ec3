"""The run that `model.from_run` names: whether its weights are there to start from."""

from pathlib import Path

from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.pipeline.models.paths import user_path


def source_of(config: RunConfig) -> Path | None:
    """Its folder, if the setting is made."""
    name = config.model.from_run
    return user_path(name).resolve() if name else None


def check_start(config: RunConfig) -> None:
    """Check that the run that `model.from_run` names can be read, without reading weights.

    Raises:
        ConfigError: it is this run's own folder, or not a run's.
        CheckpointError: it has no complete checkpoint.
    """
    source = source_of(config)
    if source is None:
        return
    if source == config.run.path:
        raise ConfigError(
            f"model.from_run = {source}: is this run's own folder; continue it with --resume, or "
            "name another run.folder"
        )
    if not (source / "config.toml").is_file():
        raise ConfigError(f"model.from_run = {source}: holds no config.toml; name a run's folder")
    if checkpoint.newest(source / "checkpoints") is None:
        raise CheckpointError(f"model.from_run = {source}: no checkpoint was saved there")

"""The samples of a run, loaded and checked."""

from dataclasses import dataclass

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.pipeline.models.own.config import Example, OwnModelConfig


@dataclass(frozen=True)
class Corpus:
    """Training and held-out sequences."""

    train: SampleSet
    evaluation: SampleSet

    @property
    def digests(self) -> dict[str, str]:
        """Compared between peers and on resume: sample ids must mean the same samples."""
        return {"train": self.train.digest, "eval": self.evaluation.digest}

    def epochs(self, config: RunConfig) -> int:
        """How many epochs of the samples are begun: `train.max_steps` may leave some out."""
        replicas = config.pipeline.dp_size
        own, batch = len(self.train) // replicas, config.train.batch_size // replicas
        per_epoch = max(1, -(-own // batch))
        return -(-config.train.steps(per_epoch) // per_epoch)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the samples were made."""
        return tuple(dict.fromkeys((*self.train.notes, *self.evaluation.notes)))


def check_data(config: RunConfig, *, counted: bool = False) -> Corpus:
    """Load the data; the launcher does too, to report errors before it starts ranks.

    For a run that is only `counted`, large data are estimated from how they begin.

    Raises:
        ValueError, OSError, ImportError: data are missing or too short.
    """
    from thinpipe.launch.data.load import load  # a program with samples of its own needs none of it

    model = config.model
    vocab = None if isinstance(model, OwnModelConfig) else model.vocab
    drawn = (config.train.max_steps or 0) * config.train.batch_size
    classes = model.classes or 2
    seed, data = config.run.seed, config.data
    found = None
    if counted:
        from thinpipe.launch.data.estimate import estimate

        found = estimate(data, seed=seed, classes=classes)
    found = found or load(data, seed=seed, vocab=vocab, classes=classes, drawn=drawn)
    corpus = Corpus(*found)
    check_batch_size(config, corpus.train)
    return corpus


def training_samples(config: RunConfig) -> int:
    """How many samples the run trains on; the data are read if that is for them to say.

    Raises:
        ValueError, OSError, ImportError: data are missing or too short.
    """
    count = config.data.train_sequences
    return len(check_data(config).train) if count == "all" else count


def check_batch_size(config: RunConfig, training: SampleSet) -> None:
    """Check that there is enough for a step.

    Raises:
        ConfigError: there is not.
    """
    if len(training) < config.train.batch_size:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size}, but there are {len(training)} "
            f"training samples ({_limit(config)}); use a smaller batch or more data"
        )


def _limit(config: RunConfig) -> str:
    data = config.data
    return data.source if data.factory else f"data.train_sequences = {data.train_sequences!r}"


def with_sizes(config: RunConfig) -> RunConfig:
    """The config, complete for a custom model, whose data determine the size of its messages.

    Raises:
        ValueError, OSError, ImportError: the data cannot be loaded, or do not fit the model.
    """
    if not isinstance(config.model, OwnModelConfig):
        return config
    return sized_for(config, check_data(config).train)


def sized_for(config: RunConfig, training: SampleSet) -> RunConfig:
    """The same for samples that are loaded.

    Raises:
        ValueError: the model does not take them, or cannot be cut where the config says.
    """
    assert isinstance(config.model, OwnModelConfig)
    batch = training.batch([0])
    example = Example(*(part[0].to("meta") for part in (batch.inputs_BT, batch.targets)))
    sized = config.model_copy(update={"model": config.model.with_example(example)})
    sized.check_model_cuts()
    return sized

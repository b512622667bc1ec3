"""The samples of a run, loaded and checked."""

from dataclasses import dataclass

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.pipeline.models.own.example import Example


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
        return tuple(dict.fromkeys((*self.train.notes, *self.evaluation.notes)))


def check_data(config: RunConfig, *, counted: bool = False) -> Corpus:
    """Load the data; the launcher does too, to report errors before it starts ranks.

    For a run that is only `counted`, large data are estimated from how they begin.

    Raises:
        ValueError, OSError, ImportError: data are missing or too short.
    """
    from thinpipe.launch.data.classification import Labelling
    from thinpipe.launch.data.load import load  # a program with samples of its own needs none of it

    model = config.model
    labelling = Labelling(model.classes or 2, model.problem, model.token_types)
    drawn = (config.train.max_steps or 0) * config.train.batch_size
    seed, data = config.run.seed, config.data
    found = None
    if counted:
        from thinpipe.launch.data.estimate import estimate

        found = estimate(data, seed=seed, labelling=labelling)
    vocab = model.token_limit
    found = found or load(data, seed=seed, vocab=vocab, labelling=labelling, drawn=drawn)
    corpus = Corpus(*found)
    check_batch_size(config, corpus.train)
    return corpus


def training_samples(config: RunConfig) -> int:
    """How many samples the run trains on; the data are read if that is for them to say."""
    count = config.data.train_sequences
    return len(check_data(config).train) if count == "all" else count


def check_batch_size(config: RunConfig, training: SampleSet) -> None:
    """Check that there is enough for a step.

    Raises:
        ConfigError: there is not.
    """
    if len(training) < config.train.batch_size:
        data = config.data
        limit = data.source if data.factory else f"data.train_sequences = {data.train_sequences!r}"
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size}, but there are {len(training)} "
            f"training samples ({limit}); use a smaller batch or more data"
        )


def with_sizes(config: RunConfig) -> RunConfig:
    """The config, complete for samples of the user's own, which determine the size of messages."""
    if not _sized_by_samples(config):
        return config
    return sized_for(config, check_data(config).train)


def _sized_by_samples(config: RunConfig) -> bool:
    return config.model.is_own or config.data.factory is not None


def sized_for(config: RunConfig, training: SampleSet) -> RunConfig:
    """The same for samples that are loaded."""
    if not _sized_by_samples(config):
        return config
    model = config.model
    batch = model.adapted(training.batch(range(min(2, len(training)))))
    longest = getattr(training, "longest", None)  # of samples of one's own
    if not model.is_own:
        tokens = longest or batch.inputs_BT.shape[1]
        model.check_tokens(tokens, tokenizer="")  # which is the program's
        data = config.data.model_copy(update={"sequence_length": tokens})
        return config.model_copy(update={"data": data})
    sized = config.model_copy(update={"model": model.with_example(Example.of(batch, longest))})
    sized.check_model_cuts()
    return sized

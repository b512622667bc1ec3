"""RunConfig -> the samples of a run, loaded and checked."""

from dataclasses import dataclass

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.load import load
from thinpipe.launch.data.sample_set import SampleSet


@dataclass(frozen=True)
class Corpus:
    """Training and held-out sequences."""

    train: SampleSet
    evaluation: SampleSet

    @property
    def digests(self) -> dict[str, str]:
        """What peers and resumed runs compare: sample ids must mean the same text."""
        return {"train": self.train.digest, "eval": self.evaluation.digest}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the samples were made."""
        return tuple(dict.fromkeys((*self.train.notes, *self.evaluation.notes)))


def check_data(config: RunConfig) -> Corpus:
    """Load the data; the launcher does so too, so that errors appear before ranks are started.

    Raises:
        ValueError, OSError, ImportError: there is no such text, or not enough of it.
    """
    model = config.model
    corpus = Corpus(
        *load(config.data, seed=config.run.seed, vocab=model.vocab, classes=model.classes or 2)
    )
    if len(corpus.train) < config.train.batch_size:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size}, but there are {len(corpus.train)} "
            f"training samples (data.train_sequences = {config.data.train_sequences!r}); use a "
            "smaller batch or more data"
        )
    return corpus

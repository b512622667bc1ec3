"""The samples of a run, loaded and checked."""

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
        """Compared between peers and on resume: sample ids must mean the same samples."""
        return {"train": self.train.digest, "eval": self.evaluation.digest}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the samples were made."""
        return tuple(dict.fromkeys((*self.train.notes, *self.evaluation.notes)))


def check_data(config: RunConfig) -> Corpus:
    """Load the data; the launcher does too, to report errors before it starts ranks.

    Raises:
        ValueError, OSError, ImportError: data are missing or too short.
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

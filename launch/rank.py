"""A rank of `thinpipe train`, from its samples to the end of its process."""

import os
from typing import NoReturn

from thinpipe.launch.checkpoint.resume import Resume
from thinpipe.launch.checkpoint.run_folder import check_folder
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.corpus import Corpus, check_data
from thinpipe.launch.host.allocator import keep_freed_memory
from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.fork_server import end_with_parent
from thinpipe.launch.net.ranks.group import joins
from thinpipe.launch.net.ranks.handshake import HandshakeError
from thinpipe.launch.net.ranks.session import SHOW
from thinpipe.launch.run.ending import end_failed
from thinpipe.launch.run.run import RankRun


def train_as_rank(config: RunConfig, resume: Resume, *, show: int) -> NoReturn:
    """Train, write the samples that were asked for, and end this process."""
    end_with_parent()
    keep_freed_memory()
    os.environ[SHOW] = str(show)
    try:
        trained = _train(config, resume, show=show)
        if config.eval.samples and os.environ.get("LOCAL_RANK", "0") == str(show):
            from thinpipe.launch.trained.cli import show_samples  # in the end

            texts = show_samples(config)
            if texts and trained and os.environ["RANK"] == "0" and not joins():
                from thinpipe.launch.run.report import add_samples

                add_samples(config.run.path, texts)
    except BaseException as error:
        end_failed(error, config, clear=(ValueError, HandshakeError))
    end_now(0)


def _train(config: RunConfig, resume: Resume, *, show: int) -> bool:
    """Train as one rank of a run, under the environment that torchrun sets; whether any was left.

    The rank with local rank `show` shows progress on each host; all ranks have the same numbers.

    Raises:
        ConfigError, HandshakeError, CheckpointError: the run cannot start.
        PeerError: a peer failed; start again with `resume`.
    """
    corpus, problem = _load(config)
    facts = {"data": corpus.digests if corpus else None}
    epochs = corpus.epochs(config) if corpus else config.train.epochs
    with RankRun(config, resume, show=show, facts=facts, problem=problem) as run:
        for _ in run.epochs(epochs):
            assert corpus is not None, "no rank joins if one has a problem"
            for batch in run.batches_of(corpus.train, config.train.batch_size):
                run.step(batch)
            done = run.epoch + 1
            due = done % config.eval.every_epochs == 0 or done == epochs
            if due and not run.done_before:
                run.evaluate_on(corpus.evaluation)
        return not run.done_before


def _load(config: RunConfig) -> tuple[Corpus | None, str | None]:
    """The samples, or what keeps this rank from starting."""
    try:
        check_folder(config.run.path)
        return check_data(config), None
    except (ValueError, OSError, ImportError) as error:
        return None, explain(error)

"""Fine-tuning on conversations across three cuts, against plain transformers and torch.

    python -m benchmarks.fidelity.chat --model smollm2 --folder runs/chat --steps 90 \
        --cuts raw .3/.3 .7/.9

Makes 400 conversations of three turns, trains the model of a Hugging Face folder on them in four
stages, and then in this process without ThinPipe: `apply_chat_template`, a loop and AdamW, with the
samples of each step in the same order. The rate falls as a cosine to zero. Cuts are raw, or
transforms of two steps, forward and backward, and if wanted two of `first_step`. Prints for each
kind of cuts both held-out losses on the tokens of the assistant, their difference, and that of each
step's loss.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.launch.view.report.metrics import read_metrics

_COUNT, _BATCH, _LENGTH, _LR = 400, 8, 128, 1e-4
_RUN = """
[run]
folder = "{run}"
[model]
pretrained = "{model}"
tie_embeddings = "exact"
[data]
path = "{folder}/talks.jsonl"
messages_field = "messages"
tokenizer = "{model}"
sequence_length = {length}
packing = false
train_sequences = "all"
eval_sequences = "all"
[pipeline]
cuts = [8, 15, 23]
device = "cpu"
microbatches = 2
[[boundary]]
forward = {{ {forward} }}
backward = {{ {backward} }}
[train]
epochs = {epochs}
max_steps = {steps}
batch_size = {batch}
lr = {lr}
warmup_steps = 0
decay = "cosine"
"""


def conversation(number: int) -> list[dict[str, str]]:
    """Three questions and answers about two numbers."""
    chosen = random.Random(number)
    one, two = chosen.randrange(100), chosen.randrange(100)
    total = one + two
    said = (
        f"What is {one} plus {two}?", f"{one} plus {two} is {total}.",
        "And twice that?", f"Twice {total} is {2 * total}.",
        "Is the sum even?", "Yes, it is even." if total % 2 == 0 else "No, it is odd.",
    )  # fmt: skip
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]


def _learnt(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[Tensor, Tensor]:
    """Ids and targets of a conversation: its answers, each with its end mark."""

    def rendered(part: list[dict[str, str]], *, prompt: bool = False) -> list[int]:
        text = tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ids = rendered(messages)
    counts = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(rendered(messages[:number], prompt=True))
            stop = ids.index(tokenizer.eos_token_id, start) + 1
            counts[start:stop] = [True] * (stop - start)
    targets = [token if own else -100 for token, own in zip(ids, counts, strict=True)]
    return torch.tensor(ids), torch.tensor(targets)


def _loss(model: Any, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, int]:
    """The summed loss of samples, and how many tokens it is over."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids_BT = pad([ids for ids, _ in samples], batch_first=True)
    targets_BT = pad([own for _, own in samples], batch_first=True, padding_value=-100)
    mask_BT = pad([torch.ones_like(ids) for ids, _ in samples], batch_first=True)
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits
    logits, targets = logits_BTV[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum"), int((targets != -100).sum())


def plain(folder: str, talks: list[list[dict[str, str]]], steps: int) -> Iterator[float]:
    """The loss of each step, and at last the held-out one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = [_learnt(tokenizer, talk) for talk in talks]
    training = [one for number, one in enumerate(samples) if number % 10 != 9]
    sampler = EpochSampler(len(training), batch_size=_BATCH, replicas=1, replica=0, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01)
    rates = get_scheduler("cosine", optimizer, 0, steps)
    for step in range(steps):
        total, count = _loss(model, [training[i] for i in sampler.ids(step).tolist()])
        torch.autograd.backward(total / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        yield float(total.detach()) / count
    with torch.no_grad():
        held_out = samples[9::10]
        sums = [_loss(model, held_out[at : at + 8]) for at in range(0, len(held_out), 8)]
    yield sum(float(total) for total, _ in sums) / sum(count for _, count in sums)


def trained(
    model: Path, folder: Path, cuts: str, steps: int
) -> tuple[list[float], dict[str, float | None]]:
    """The loss of each step and at last the held-out one; how many times fewer bytes were sent."""
    kind = ['kind = "raw"'] * 2
    if cuts != "raw":
        steps_given = [float(step) for step in cuts.split("/")]
        kind = [f'kind = "transform", step = {step}' for step in steps_given[:2]]
        for way, first in enumerate(steps_given[2:]):
            kind[way] += f", first_step = {first}"
    run = folder / cuts.replace("/", "_")
    sizes: dict[str, Any] = {"length": _LENGTH, "batch": _BATCH, "lr": _LR, "steps": steps}
    sizes["epochs"] = -(-steps * _BATCH // (_COUNT - _COUNT // 10))
    sizes |= {"forward": kind[0], "backward": kind[1], "run": run, "model": model}
    run_file = folder / f"{run.name}.toml"
    run_file.write_text(_RUN.format(folder=folder, **sizes), encoding="utf-8")
    command = [sys.executable, "-m", "thinpipe.launch", "train", str(run_file)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    records = read_metrics(run / "metrics.jsonl")
    assert records[-1].eval, "evaluated at the end"
    found = {"held_out_compressed": records[-1].eval.get("loss_compressed")}
    for epoch in range(1, records[-1].epoch + 1):
        sent = [total for one in records if one.epoch == epoch for total in one.wire]
        fp32 = 4 * sum(total.values for total in sent)
        found[f"ratio_fp32_epoch_{epoch}"] = fp32 / sum(total.nbytes for total in sent)
    return [*(record.loss for record in records), records[-1].eval["loss"]], found


def main() -> None:
    """Run each and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--cuts", nargs="+", default=["raw"], metavar="raw|STEPS")
    options = parser.parse_args()
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True)
    talks = [conversation(number) for number in range(_COUNT)]
    rows = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (folder / "talks.jsonl").write_text(rows, encoding="utf-8")
    theirs = [*plain(options.model, talks, options.steps)]
    for cuts in options.cuts:
        ours, found = trained(Path(options.model).resolve(), folder, cuts, options.steps)
        gaps = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
        line = {"cuts": cuts, "steps": options.steps, "held_out": ours[-1]}
        line |= {"held_out_plain": theirs[-1], "held_out_gap": gaps[-1], "step_gaps": gaps[:-1]}
        sys.stdout.write(json.dumps(line | found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

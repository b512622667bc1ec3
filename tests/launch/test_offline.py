"""What trains on files of this machine asks no other one for anything, not even for a name."""

import json
import os
import socket
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests import preload
from tests.commands import PATIENCE_S
from tests.huggingface import saved_model

pytestmark = pytest.mark.slow

WATCH = """
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
static void note(const char *where) {
    char line[300];
    int n = snprintf(line, sizeof line, "%.250s\\n", where);
    int file = open(getenv("ASKED"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file >= 0 && write(file, line, n) == n) close(file);
}
static void note_address(const struct sockaddr *to) {
    char text[INET6_ADDRSTRLEN];
    if (to && to->sa_family == AF_INET)
        note(inet_ntop(AF_INET, &((struct sockaddr_in *)to)->sin_addr, text, sizeof text));
    if (to && to->sa_family == AF_INET6)
        note(inet_ntop(AF_INET6, &((struct sockaddr_in6 *)to)->sin6_addr, text, sizeof text));
}
int connect(int socket, const struct sockaddr *to, socklen_t length) {
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    note_address(to);
    return real(socket, to, length);
}
int getaddrinfo(const char *name, const char *port, const struct addrinfo *hints,
                struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    if (name) note(name);
    return real(name, port, hints, found);
}
"""

RUN = """
[run]
folder = "run"
[model]
pretrained = "model"
[data]
path = "text.txt"
sequence_length = 16
train_sequences = 8
eval_sequences = 2
[pipeline]
cuts = [3]
microbatches = 2
device = "cpu"
[train]
epochs = 1
batch_size = 4
"""


def is_elsewhere(name: str) -> bool:
    """Whether it is neither loopback nor this machine's own name."""
    try:
        address = ip_address(name.removeprefix("::ffff:"))
    except ValueError:
        return name not in ("localhost", socket.gethostname(), socket.getfqdn())
    return not (address.is_loopback or address.is_unspecified)


@pytest.mark.parametrize(
    "words",
    [
        "init new.toml --model model --data text.txt",
        "train run.toml --dry-run",
        "train run.toml",
        "train run.toml --dry-run --set data.text_field=text --set data.path=rows.jsonl",
        "train run.toml --dry-run --set data.text_field=text --set data.path=saved",
    ],
)
def test_nobody_else_is_asked(tmp_path: Path, words: str) -> None:
    from datasets import Dataset  # takes a second

    rows = [{"text": f"{n} squared is {n * n}."} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "model").mkdir()
    saved_model("gpt2", tmp_path / "model")
    (tmp_path / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    (tmp_path / "run.toml").write_text(RUN)
    asked = tmp_path / "asked"
    library = preload.build(WATCH, tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "thinpipe.launch", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "LD_PRELOAD": str(library), "ASKED": str(asked)},
        capture_output=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = asked.read_text(encoding="utf-8").split() if asked.exists() else []
    assert not [name for name in names if is_elsewhere(name)]
    assert names or words != "train run.toml", "a run connects its ranks: this saw nothing"

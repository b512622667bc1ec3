"""Keys are the user's alone; machines with keys of their own keep their names."""

import os
import ssl
import time
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.invoking import printed
from thinpipe.launch.net.overlay import joining, keys
from thinpipe.launch.net.overlay.relay import Relay
from thinpipe.launch.net.overlay.settings import Settings


def test_only_the_user_reads_a_key_and_it_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    keys.new(path, days=3)
    assert path.stat().st_mode & 0o777 == 0o600
    info = keys.read(path)
    assert info.name is None
    assert (info.not_after - info.not_before).days == 3 + 2  # clocks may differ by two days
    for context in keys.contexts(path):  # both sides must prove themselves
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    with pytest.raises(ValueError, match="exists; a key is never overwritten"):
        keys.new(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"other users of this machine can read it; chmod 600"):
        keys.contexts(path)
    with pytest.raises(ValueError, match=r"no such file, seen from .*; copy it from the machine w"):
        keys.contexts(tmp_path / "other.key")


def test_a_machines_key_has_its_name(tmp_path: Path) -> None:
    run, own = tmp_path / "run.key", tmp_path / "b.key"
    keys.new(run)
    keys.add(run, "b", own)
    assert keys.read(own).name == "b"
    with pytest.raises(ValueError, match="the key of one machine; sign with the run's key"):
        keys.add(own, "c", tmp_path / "c.key")
    with pytest.raises(ValueError, match="use letters, digits"):
        keys.add(run, "no name", tmp_path / "c.key")


@pytest.mark.parametrize("text", ["", "no key", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_other_files_are_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.key"
    path.write_text(text)
    path.chmod(0o600)
    for use in (keys.contexts, keys.read):
        with pytest.raises(ValueError, match=r"not a key of ThinPipe's"):
            use(path)


def test_the_commands_say_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'key_file = "run.key"' in printed("key", "new", "run.key")
    assert 'network.name = "b"' in printed("key", "add", "b")
    printed("key", "new", "run.key", code=2)


def test_a_full_disk_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = open

    def fdopen(descriptor: int, mode: str) -> object:
        os.close(descriptor)
        return full("/dev/full", mode, buffering=0)

    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.raises(ValueError, match=r"run\.key: not written: No space left on device"):
        keys.new(tmp_path / "run.key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("days", [-9, 500])
def test_a_clock_by_which_the_key_is_not_valid_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    path, now_s = tmp_path / "run.key", time.time()
    keys.new(path)
    settings = Settings(
        name="h1", key_file=path, needed=2, listen=None, coordinator=None, patience_s=9
    )
    monkeypatch.setattr(keys, "time", SimpleNamespace(time=lambda: now_s - 86400))
    Relay(settings)  # a day off changes nothing
    monkeypatch.setattr(keys, "time", SimpleNamespace(time=lambda: now_s + days * 86400))
    here, there = (date.fromtimestamp(now_s + d * 86400) for d in (0, days))
    said = f"{path}: valid from {here - timedelta(2)} to .* the clock of h1 says {there}; correct"
    with pytest.raises(ValueError, match=said):
        Relay(settings)


def failures(accepting: ssl.SSLContext, connecting: ssl.SSLContext) -> list[ssl.SSLError]:
    """What goes wrong when two ends shake hands, first on the connecting side, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = connecting.wrap_bio(to_client, to_server)
    server = accepting.wrap_bio(to_server, to_client, server_side=True)
    shakes = [client.do_handshake, server.do_handshake]
    found = []
    for step in [*shakes, *shakes, lambda: client.read(1)]:
        try:
            step()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            found.append(error)
    return found


@pytest.mark.parametrize("ended", ["connecting", "accepting", "neither"])
def test_a_key_that_has_expired_is_told_from_one_of_another_run(tmp_path: Path, ended: str) -> None:
    """Keys of single machines, one of which was valid until yesterday."""
    contexts = {}
    run, other = tmp_path / "run.key", tmp_path / "other.key"
    for number, path in enumerate((run, other)):
        keys.new(path)
        end = ("connecting", "accepting")[number]
        keys.add(run, end, tmp_path / f"{end}.key", days=-1 if end == ended else 9)
        own = other if ended == "neither" and path == other else tmp_path / f"{end}.key"
        contexts[end] = keys.contexts(own)[1 - number]
    found = failures(contexts["accepting"], contexts["connecting"])
    words = "another run's" if ended == "neither" else "correct the clocks"
    verified = [error for error in found if isinstance(error, ssl.SSLCertVerificationError)]
    told = [error for error in found if "ALERT" in str(error)]
    assert verified
    assert told
    assert all(words in joining._explain(error) for error in (*verified, *told)), found

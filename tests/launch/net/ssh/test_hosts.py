"""The hosts file: what is rejected, who has how many ranks, and where machines meet."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.net.ssh import processes
from thinpipe.launch.net.ssh.commands import Start, ssh_commands
from thinpipe.launch.net.ssh.hosts import HostsConfig, load_hosts, rendezvous
from thinpipe.launch.start_hosts import check_run

GOOD = '[[host]]\nname = "a"\ncheckout = "x"\n'


def load(tmp_path: Path, text: str) -> HostsConfig:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return load_hosts(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "host: not given; write at least one table [[host]]"),
        ('[host]\nname = "a"', "host = {'name': 'a'}: write it as tables [[host]]"),
        (GOOD + 'interfaces = "eth0"', 'host.0.interfaces: unknown key; did you mean "interface"'),
        ('[[host]]\nname = "a"', "host.0.checkout: not given"),
        ("host = []", "host = []: write it as tables [[host]]"),
        ('host = ["a"]', "host.0 = 'a': write it as a table"),
        (GOOD + 'port = "ssh"', "host.0.port = 'ssh': give a whole number"),
        ("[train]\nlr = 1", "a run file; the hosts file comes first: thinpipe launch HOSTS"),
        (GOOD + GOOD, "host.name = 'a': duplicate; give each host its own name"),
        (GOOD + 'address = "-oProxyCommand=x"', "host.0.address: '-oProxyCommand=x': use letters"),
        (GOOD + 'address = "ada@10.0.0.1"', "'ada@10.0.0.1': put the user into user ="),
        (GOOD + 'address = "10.0.0.1:22"', "'10.0.0.1:22': put the port into port ="),
        (GOOD + "port = true", "host.0.port = true: give a number"),
        (GOOD + "port = 0", "host.0.port = 0: use 1 or more"),
        (GOOD + 'environment = { "A B" = "" }', "'A B': name it with letters, digits and _"),
        ('rdzv = "a"\n' + GOOD, "rdzv = 'a': write a host and a port, as in host0:29500"),
        (
            GOOD + 'interface = "eth0"\nenvironment = { GLOO_SOCKET_IFNAME = "eth1" }',
            "host.0.interface = 'eth0': environment sets GLOO_SOCKET_IFNAME too; remove one",
        ),
    ],
)
def test_invalid_hosts_files_are_rejected_naming_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as rejected:
        load(tmp_path, text)
    assert str(rejected.value).startswith(f"{tmp_path / 'hosts.toml'}: ")
    assert message in str(rejected.value)
    assert len(str(rejected.value).splitlines()) == 1  # one error, one line


RUN = """
[model]
layers = 4
[pipeline]
cuts = [1, 2, 3]
"""
TWO = '[[host]]\nname = "a"\ncheckout = "x"\nranks = 3\n[[host]]\nname = "b"\ncheckout = "x"\n'


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        ("ranks = 1", "", ""),
        ("ranks = 2", "", "the hosts file has 3 + 2 = 5 ranks, the run has 4"),
        ("ranks = 1", 'placement = [["a", "b", "a", "a"]]', ""),
        ("ranks = 1", 'placement = [["a", "b", "a", "b"]]', "ranks = 3 of a: pipeline.placement"),
    ],
)
def test_machines_may_have_unequal_shares(
    tmp_path: Path, ranks: str, more: str, message: str
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN + more)
    hosts = load(tmp_path, TWO + ranks)
    if message:
        with pytest.raises(ConfigError, match="^[^\n]*" + message.replace("+", r"\+")):
            check_run(hosts, str(run), [])
        return
    check_run(hosts, str(run), [])
    own = [command[-1] for command in ssh_commands(hosts, Start("run.toml")).values()]
    assert ["--ranks 3" in own[0], "--ranks 1" in own[1]] == [True, True]
    with pytest.raises(ConfigError, match=r"host.1.ranks: not given, as other hosts have it"):
        load(tmp_path, TWO)


@pytest.mark.parametrize(
    ("name", "found"), [("alias", "10.0.0.7:29500"), ("host0", "host0:29500"), ("X1", "X1:29500")]
)
def test_an_alias_of_ssh_is_resolved_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    """ssh says every name in small letters."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\necho user me\necho hostname $(echo $2 | sed s/alias/10.0.0.7/ | tr X x)\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert rendezvous(load(tmp_path, GOOD.replace('"a"', f'"{name}"'))) == found
    ssh.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rendezvous(load(tmp_path, GOOD)) == "a:29500", "without ssh"


def test_an_ipv6_address_is_in_brackets_where_something_follows_it(tmp_path: Path) -> None:
    hosts = load(tmp_path, GOOD + 'address = "2001:db8::1"\nuser = "ada"\n')
    assert rendezvous(hosts) == "[2001:db8::1]:29500"
    assert hosts.host[0].destination == "ada@2001:db8::1"  # as ssh takes it


@pytest.mark.parametrize(
    ("codes", "failed"),
    [((0, 75, 0), None), ((75, None, 3), ("c", 3)), ((None, 75, 143), ("c", 143))],
)
def test_a_machine_that_others_go_on_without_is_no_failure(
    codes: tuple[int | None, ...], failed: tuple[str, int] | None
) -> None:
    started: Any = {
        name: SimpleNamespace(code=code) for name, code in zip("abc", codes, strict=True)
    }
    assert processes._first_failure(started) == failed

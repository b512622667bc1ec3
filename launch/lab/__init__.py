"""Emulated hosts joined by slow links, on one Linux machine, without touching its own network.

`network.py` is the Python interface, `cli.py` the command line. `sandbox.py` is the process that
owns the namespaces and adds delays; in it `links.py` creates hosts and links, `shaping.py` limits
rates, and `control.py` changes them during a run. `commands.py` and `ranks.py` run commands
and functions on every host, `probe.py` measures idle links. `launch/host/links.py` describes
networks.
"""

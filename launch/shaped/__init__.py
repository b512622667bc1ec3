"""Emulated hosts joined by slow links, on one Linux machine, without touching its own network.

`spec.py` says what a network looks like, `network.py` is the Python interface, `cli.py` the
command line. `sandbox.py` is the process that owns the namespaces; in it `links.py` makes hosts and
cables, `shaping.py` their rates, `relay.py` delays, and `control.py` changes rates while a run goes
on. `commands.py` and `ranks.py` run something on every host, `probe.py` measures empty links.
"""

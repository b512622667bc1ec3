"""The private network of a run: one authenticated port per host, and loopback for all the rest.

`relay.py` is a process of its own on every host; `process.py` starts it.
"""

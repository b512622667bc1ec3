"""Frames between two hosts, over connections that may break: start with `session.py`, `link.py`."""

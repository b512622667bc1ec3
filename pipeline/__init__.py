"""The pipeline engine: stages of a transformer on different ranks, joined by compressed links.

`wire/` turns tensors into bytes, `boundary.py` is one end of one direction of a cut, `link.py`
moves the bytes, `channel.py` puts a header on them, `stage.py` joins them to torch's schedules,
`engine.py` runs training and evaluation steps.
"""

"""AQ-SGD: both ends cache what was last seen of a sample, and its changes are sent.

`delta.py` quantizes changes as in the paper; `transform/` codes them in a learned basis.
"""

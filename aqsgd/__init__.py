"""AQ-SGD: what was last seen of a sample is remembered at both ends, and its changes are sent.

`delta.py` quantizes changes as in the paper; `transform/` codes them in a learned basis.
"""

"""AQ-SGD: activations are sent as changes against what was last seen of the same sample."""

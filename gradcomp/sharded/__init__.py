"""A stage's weights over several ranks: FSDP2, with QSDP's quantized collectives."""

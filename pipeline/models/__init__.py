"""Transformers as chains of blocks: our own, and torchgpipe inside a stage."""

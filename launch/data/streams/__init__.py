"""Data that are read in one pass: samples in blocks, and how rows become them."""

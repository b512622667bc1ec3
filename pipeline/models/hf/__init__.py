"""Hugging Face transformers, cut between blocks."""

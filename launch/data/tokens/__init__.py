"""Tokens are made once on a host: pieces of text, files in the cache, progress."""

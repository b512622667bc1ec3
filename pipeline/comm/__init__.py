"""Joins two stages: a boundary (codec with a cache), a link, and the channel over both."""

"""What joins two stages: a boundary (codec with memory), a link, and the channel over both."""

"""What a run needs of a host's memory, counted before anything is built."""

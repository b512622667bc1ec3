"""A run's need of a host's memory, counted before anything is built."""

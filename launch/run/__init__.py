"""A run of one rank: its loop, and how Python programs make one."""

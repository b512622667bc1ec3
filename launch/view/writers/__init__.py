"""A run's numbers in other tools as well; a file per tool, named like its setting."""

"""Trained models, taken home: as modules, files, folders and text."""

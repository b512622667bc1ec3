"""Connects hosts: private links (`overlay/`), processes of ranks (`ranks/`), ssh (`ssh/`)."""

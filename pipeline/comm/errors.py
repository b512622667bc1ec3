"""The errors of everything that leaves a rank."""


class TransportError(RuntimeError):
    """A peer did not deliver or did not take a message; the text names the edge."""


class SilentError(TransportError):
    """A peer is silent for as long as ranks wait for each other."""

"""The error of everything that leaves a rank."""


class TransportError(RuntimeError):
    """A peer did not deliver or did not take a message; the text names the edge."""

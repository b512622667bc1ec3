"""What a run measures and shows: metrics, console, pictures, HTML."""

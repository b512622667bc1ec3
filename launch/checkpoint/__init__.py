"""What a run keeps on disk: its folder, checkpoints, resume under another layout, export."""

"""The grid tree: joint match of attention blocks and checkpoints, and their lifetime."""

"""Serving under a simulated clock, over the same pools and tree that serve."""

"""Policies that others have published, written from their papers: what ours is compared with."""

"""Checkpoints in any store that fsspec reaches: written in the background, and either valid or absent."""

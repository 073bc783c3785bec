"""Checkpoints in any store that fsspec reaches: written in the background, valid or not there."""

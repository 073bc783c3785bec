"""Deals samples in an epoch of training and in a pass of evaluation, over a world that changes."""

"""Who gets which samples: an epoch of training, and a pass of evaluation, over a world that changes."""

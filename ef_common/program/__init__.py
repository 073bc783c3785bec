"""Programs that consist of a model and one `forward`: what the frameworks share, without importing any."""

"""Programs, that is a model and one `forward`: what the frameworks share of them, without importing any."""

"""Horovod as an engine: a wheel of it that builds with today's torch and TensorFlow, and survives lost peers."""

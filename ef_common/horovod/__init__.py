"""Horovod as an engine: a wheel that builds with today's torch and TensorFlow and survives lost peers."""

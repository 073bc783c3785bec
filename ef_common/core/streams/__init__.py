"""Streams of shards: who reads which part of which shard, as a function of the members and of what they have found.

See :mod:`ef_common.core.streams.stream`.
"""

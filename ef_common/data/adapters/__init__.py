"""Streams of shards made of what people have: files of lines, Parquet, TFRecords, and other libraries' data sets.

Each module knows one library, and imports it only when it is used.
"""

"""Streams of shards made of files of lines, Parquet, TFRecords, and the data sets of other libraries.

Each module knows one library, and imports it only when it is used.
"""

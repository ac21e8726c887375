"""Rows from files: found, streamed once into a cache, filtered by length, and read one at a time."""

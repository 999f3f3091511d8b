"""Runs over many images: rows, the resumable loop, tables and comparisons."""

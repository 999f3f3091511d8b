"""Measurements that take too long for tests: coverage of models, speed, memory. `python -m
benchmarks.NAME`."""

"""Measurements that take too long for tests: coverage of models, speed, memory. Run with `python -m benchmarks.NAME`."""

"""Suites of `stress`, one file each; `runs.suite.SUITES` imports them when it is first read."""

"""The command line for large runs: what they will cost."""

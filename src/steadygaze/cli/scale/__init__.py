"""The command line for large runs: what they will cost, and how far they have come."""

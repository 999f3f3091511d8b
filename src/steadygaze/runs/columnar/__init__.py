"""The rows of a run as columns: how millions of them are held, read and exported."""

"""One file for each library or family of models."""

"""One file for each library or family of models; each registers itself when it is imported."""

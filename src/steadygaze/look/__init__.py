"""Looking into a model: what it attends to, what its features are, and which tokens are out of line."""

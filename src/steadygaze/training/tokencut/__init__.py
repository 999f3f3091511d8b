"""Object masks without labels: TokenCut, and a bilateral solver that moves their edges to those of the
image."""

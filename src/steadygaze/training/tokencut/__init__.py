"""Object masks without labels: TokenCut."""

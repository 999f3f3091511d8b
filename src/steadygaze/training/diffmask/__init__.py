"""Training of DiffMask gates."""

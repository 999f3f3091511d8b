"""Training of ViT-Shapley (`steadygaze shapley train`): settings, one step, and the resumable run."""

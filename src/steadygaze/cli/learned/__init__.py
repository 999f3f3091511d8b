"""`steadygaze diffmask train` and `steadygaze shapley train`: explanation methods that are trained for a
model."""

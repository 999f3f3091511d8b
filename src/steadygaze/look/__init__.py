"""Looking at a model before explaining it: attention, features, what its layers write, outlier tokens."""

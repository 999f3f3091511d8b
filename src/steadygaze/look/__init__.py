"""Looking at a model: its attention, its features."""

"""Images for training: selection, loading, augmentation, and which of them make a step."""

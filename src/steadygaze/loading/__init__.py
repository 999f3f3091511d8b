"""From a name or a checkpoint to a model that is ready to use."""

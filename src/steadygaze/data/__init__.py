"""Pictures, masks and tasks."""

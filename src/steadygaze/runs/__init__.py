"""Runs over many pictures: the rows they leave, and how a run that stopped goes on."""

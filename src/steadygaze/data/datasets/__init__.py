"""Published data sets, each read from the files that its authors distribute."""

"""Reports: from rows to one HTML file that works offline. Besides rows, only the images it shows are read."""

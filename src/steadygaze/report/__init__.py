"""From rows to one HTML file that works offline. It reads rows and nothing else, except for the pictures it shows."""

"""`python -m steadygaze`."""

from steadygaze.cli import main

main()

"""What can be named: `steadygaze methods`, `metrics`, `suites`, `losses` and `models`, and their index."""

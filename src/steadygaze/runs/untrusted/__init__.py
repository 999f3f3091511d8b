"""Reading run folders that somebody else may have made: bounded, and checked before anything is computed."""

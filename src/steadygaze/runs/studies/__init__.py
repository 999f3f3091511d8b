"""What is read from several runs: sweeps of recipes, and classes that were trained on against others."""

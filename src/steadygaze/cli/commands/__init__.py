"""The commands as typer sees them: names, options, help. Each imports its implementation when called."""

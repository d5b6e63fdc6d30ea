"""What the user sees while a search runs. Only the command line imports it."""

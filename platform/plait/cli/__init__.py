"""The command line: verbs, Hydra applications, errors as value, rule and remedy, and what is printed."""

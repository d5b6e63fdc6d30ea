"""The search: Optuna draws trials, places in the running group are filled with them, results are told."""

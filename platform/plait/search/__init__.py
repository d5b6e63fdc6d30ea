"""The search: Optuna suggests trials, these fill the slots of the running group, and results are reported."""

"""The search: Optuna suggests trials, they fill the slots of the running group, results are reported."""

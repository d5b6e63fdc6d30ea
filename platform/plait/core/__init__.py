"""Plain data for all other packages: jobs, plans, settings, messages, states. Imports nothing of
plait."""

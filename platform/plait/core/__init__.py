"""Plain data that all else speaks in: jobs, plans, settings, messages, states. Imports nothing of plait."""

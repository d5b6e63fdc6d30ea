"""Plait's Hydra plugins."""

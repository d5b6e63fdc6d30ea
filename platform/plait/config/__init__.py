"""Hydra's configuration and overrides become frozen dataclasses here."""

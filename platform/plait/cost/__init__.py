"""Predicted seconds and bytes: models fitted to measurements, and profiles of clusters."""

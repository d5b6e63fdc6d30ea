"""Figures and reports from what MLflow holds."""

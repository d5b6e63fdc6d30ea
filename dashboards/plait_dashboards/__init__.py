"""Figures and reports of searches, from MLflow and the study.

``reading`` turns a stored search into a ``Sweep`` (plain data), ``figures`` turns that into Plotly figures
without touching a store, ``page`` turns figures into HTML.
"""

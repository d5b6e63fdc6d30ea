"""Adapters outside the engine: their variants, and reading and writing PEFT folders."""

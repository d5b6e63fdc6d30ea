"""Adapters beside the engine: their variants, and PEFT folders in and out."""

"""Plait: train many LoRA adapters at once over one frozen base model."""

__version__ = "0.1.0"

"""Trains jobs together: the coordinator decides, workers own the tensors, and they exchange messages."""

"""Trains jobs together: the coordinator decides, workers own the tensors, and both exchange messages."""

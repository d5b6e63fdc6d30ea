"""Training of jobs together: the coordinator decides, workers own the tensors, messages go between them."""

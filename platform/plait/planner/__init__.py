"""Pure planning: assigns jobs to groups, samples to microbatches, and devices and batches to replicas."""

"""Pure planning: jobs to groups, samples to microbatches, devices to replicas, batches to replicas."""

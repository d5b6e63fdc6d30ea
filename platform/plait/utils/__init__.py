"""Small helpers that know nothing of training: files, paths, addresses, spelling, durations."""

"""Small helpers without knowledge of training: files, paths, addresses, spelling, durations."""

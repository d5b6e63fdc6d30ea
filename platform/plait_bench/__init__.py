"""Benchmarks named in files of sweeps/: functions from settings, jobs and options to a report of figures."""

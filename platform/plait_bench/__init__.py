"""Benchmarks that files of sweeps/ name: settings, jobs and options go in, a report of figures comes out."""

"""Discrete-event simulation of schedules over pipeline stages and replicas."""

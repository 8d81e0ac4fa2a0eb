"""Measurements that can be repeated: what to run, and how to print it."""

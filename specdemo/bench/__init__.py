"""Benchmark suites: repeatable measurements, their results, reports and plots."""

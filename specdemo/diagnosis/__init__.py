"""Diagnosis of a run of speculative decoding on any engine: why it is slow and what to change. Needs no torch."""

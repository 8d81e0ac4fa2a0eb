"""Tensors and dataclasses of speculative decoding: draft trees, sampling, acceptance, the seams and the trace."""

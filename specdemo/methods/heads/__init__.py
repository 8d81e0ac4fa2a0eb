"""Heads, one file per family, with shared modules; `formats` reads and writes their checkpoints."""

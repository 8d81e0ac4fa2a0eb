"""Heads: what they share, one file each for what is their own, and their files in `formats`."""

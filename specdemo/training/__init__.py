"""Training of drafters on the output of a target, independent of methods."""

"""Learning from what a target says; names no method."""

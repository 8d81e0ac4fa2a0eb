"""What speculation would bring on a machine that is not here. Needs no torch."""

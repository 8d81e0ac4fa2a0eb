"""Predictions for other machines, and the causes of slow speculation on any engine. Needs no torch."""

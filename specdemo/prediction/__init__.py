"""Prediction of speculative decoding on other machines. Needs no torch."""

"""Recipes that trained the shipped models, for `python -m specdemo train` in a checkout."""

"""What made the shipped models: recipes of `python -m specdemo train` that come with the checkout alone."""

"""Training of the shipped models, for `python -m specdemo train` in a checkout: one program, and a file per model in
`shipped`.
"""

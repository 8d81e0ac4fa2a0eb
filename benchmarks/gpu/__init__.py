"""GPU benchmark in sections. Each section is measured once and stored in a file, so that calls of a few minutes
add up.
"""

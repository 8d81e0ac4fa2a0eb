"""Costs of speculative steps: shapes of models, curve of pass costs, acceptance, cost of a step, and memory. Pure
arithmetic that needs no torch; a target's passes are measured in models/pass_cost.py.
"""

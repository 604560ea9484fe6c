"""Recommends a memory for a model, a machine and traffic: ledger first, then simulation."""

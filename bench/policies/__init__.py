"""Policies of others, written from their papers and code, by the interface of `radix.interfaces` alone."""

"""Harness of the engine tests: prompts, servers, cold reference, expected hits, pool balance."""

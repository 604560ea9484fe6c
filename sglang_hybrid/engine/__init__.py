"""Adapters between the core and SGLang's classes: thin, no policy of their own."""

"""Platforms that SGLang lacks: an ordinary CPU with torch alone."""

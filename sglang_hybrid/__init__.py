"""One memory for attention KV and recurrent state, as a plugin for unmodified SGLang 0.5.23.

Importing the package imports neither torch nor sglang; SGLang finds it through its entry points.
"""

__version__ = "0.1.0"

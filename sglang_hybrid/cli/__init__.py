"""Commands of the console script ``sglang-hybrid``, one file each."""

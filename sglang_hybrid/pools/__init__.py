"""Pages, slabs and organizations: bookkeeping over ints; only ``arena`` and ``views`` know tensors."""

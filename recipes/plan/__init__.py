"""`rlrefit plan`: the dry run of a refit."""

"""``rlrefit bench``: the refit of a named model's true shapes on the GPUs of this host, beside its peers."""

"""A wire through memory that the ranks of one host share, for those that NCCL does not join: two of one GPU."""

# First, since each builds on the other: transports go over these groups, and these open memory as `ipc` does.
from ... import transport as transport

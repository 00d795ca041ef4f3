"""What Python's collector of reference cycles looks at, and how often, in the session and in all that its servers fork."""

from __future__ import annotations

import gc

# Of objects more than were freed, and of collections of one generation for one of the next. By Python's own, 700 of the former, a
# thirtieth of the suite's time is the collector's: it goes again and again through models that are being built.
_RARELY = (50_000, 10, 10)


def collect_rarely() -> None:
    """Take all that is there out of the collector's sight, and have it look for the rest of the process's own less often.

    What modules make as they load is never garbage, and the pages of it that a fork shares are not copied.
    """
    gc.freeze()
    gc.set_threshold(*_RARELY)
    gc.enable()

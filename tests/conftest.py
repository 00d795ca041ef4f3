"""What the whole suite shares."""

from __future__ import annotations

from .spawn import preload

# The server of processes loads while the tests are collected. It starts here and not in a hook: what its processes
# write is captured only if it starts while pytest captures, as it does now.
preload()

"""The host of a process of Ray's, as the other hosts of its cluster reach it."""

from __future__ import annotations

import ray


def node_address() -> str:
    """Address by which Ray knows this host, without the brackets that one of IPv6 may have."""
    return str(ray.util.get_node_ip_address()).strip("[]")  # type: ignore[no-untyped-call]

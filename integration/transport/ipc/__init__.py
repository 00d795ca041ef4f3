"""One-sided refits inside a host: senders write straight into the receivers' live parameters."""

from ...gpu_memory.availability import availability, facts
from .transport import IpcTransport

__all__ = ["IpcTransport", "availability", "facts"]

"""One-sided refits inside a host: senders write straight into the receivers' live parameters, or receivers read the senders'."""

from .availability import availability, facts
from .pull import PullTransport
from .transport import IpcTransport

__all__ = ["IpcTransport", "PullTransport", "availability", "facts"]

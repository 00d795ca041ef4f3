"""Refits inside a host: senders write straight into the receivers' live parameters."""

from .transport import IpcTransport

__all__ = ["IpcTransport"]

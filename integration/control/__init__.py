"""Where the ranks of an epoch meet: an authenticated store and barrier on trainer rank 0.

torch's TCPStore can't do this: it serves whoever connects, and lets anyone list, overwrite and delete all keys.
"""

from .address import Rendezvous
from .client import Connection
from .group_store import GroupStore
from .server import RendezvousServer, listen, open_rendezvous

__all__ = ["Connection", "GroupStore", "Rendezvous", "RendezvousServer", "listen", "open_rendezvous"]

"""What a rank has to know to join an epoch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from ipaddress import ip_address
from typing import Any

from ..errors import RefitError

_TOKEN = re.compile(r"[0-9a-f]{64}")


def joined(host: str, port: int) -> str:
    """``host:port``, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, leads to the host itself on every host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one epoch meet, and the secret that admits them.

    Attributes:
        host: address of trainer rank 0 as the other ranks reach it; it listens on that interface alone.
        port: its TCP port.
        train_ranks: number of trainer ranks.
        gen_ranks: number of generation ranks over all replicas.
        epoch: number of the membership.
        token: 32 random bytes in hex, new for each rendezvous. Whoever has it can join. It is left out of ``repr``. Hand it
            over by a channel that strangers can't read, such as the launcher's own.
    """

    host: str
    port: int
    train_ranks: int
    gen_ranks: int
    epoch: int = 0
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        kinds = {"host": str, "token": str}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if type(value) is not kinds.get(spec.name, int):
                raise RefitError(
                    f"the rendezvous' {spec.name} is a {type(value).__name__}; hand over what trainer rank 0 opened, "
                    "unchanged",
                    stage="rendezvous",
                    parameter=spec.name,
                )
        if not 0 < self.port < 65536 or self.train_ranks < 1 or self.gen_ranks < 1 or self.epoch < 0:
            raise RefitError(
                f"{self} is no rendezvous: the port is 1 to 65535, each side has at least one rank, and epochs count "
                "from 0",
                stage="rendezvous",
            )

    @property
    def size(self) -> int:
        """Ranks on both sides."""
        return self.train_ranks + self.gen_ranks

    @property
    def where(self) -> str:
        """Host and port, as a URL has them."""
        return joined(self.host, self.port)

    @property
    def key(self) -> bytes:
        """The token's 32 bytes.

        Raises:
            RefitError: there is no token, or it is malformed.
        """
        if not _TOKEN.fullmatch(self.token):
            raise RefitError(
                "the rendezvous carries no token (64 hex digits), so this rank can't join; hand over what "
                "open_refit_rendezvous returned on trainer rank 0, whole",
                stage="rendezvous",
                parameter="token",
            )
        return bytes.fromhex(self.token)

    @property
    def turn(self) -> int:
        """The message at which sampled checks begin: derived from the token, so the same on all ranks; below 2^63.

        Each epoch begins elsewhere, so that even short epochs check all messages over time.

        Raises:
            RefitError: as :attr:`key`.
        """
        return int.from_bytes(sha256(b"rlrefit sampled checks" + self.key).digest()[:8]) >> 1

    def to_json(self) -> dict[str, Any]:
        """Plain data, token included, to hand to the other ranks by whatever launches them."""
        return asdict(self)

    @staticmethod
    def from_json(data: object) -> Rendezvous:
        """Inverse of :meth:`to_json`.

        Raises:
            RefitError: it is no mapping, or a field is missing, unknown or of another type.
        """
        if not isinstance(data, Mapping):
            # Not its value, which may hold the token.
            given = "nothing" if data is None else f"a {type(data).__name__}"
            raise RefitError(
                f"this rank was given {given} as the rendezvous; hand what open_refit_rendezvous returned on trainer rank 0 to every "
                "rank of both sides, unchanged",
                stage="rendezvous",
            )
        known = {spec.name for spec in fields(Rendezvous)}
        wrong = sorted(known.symmetric_difference(data))
        if wrong:
            raise RefitError(
                f"the rendezvous that this rank was given lacks or does not know {', '.join(wrong)}; hand over what "
                "trainer rank 0 opened, unchanged, and run the same rlrefit on all ranks",
                stage="rendezvous",
                parameter=wrong[0],
            )
        return Rendezvous(**data)

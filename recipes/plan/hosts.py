"""Where the planned ranks are: equal hosts, and the rates of their links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ...integration.plan import Topology
from ...integration.plan.topology import COPY_GB_PER_S, NIC_GB_PER_S, NVLINK_GB_PER_S

_KEYS = ("gpus_per_host", "nic", "nvlink", "host", "colocated", "copy", "pcie", "shared_gpus")
# What a GPU reads of host memory over 16 lanes of PCIe 5 at most, nearly; not measured here.
_PCIE_GB_PER_S = 50.0


class HostsError(ValueError):
    """A topology that can't be read."""


@dataclass(frozen=True)
class Hosts:
    """Equal hosts that are filled with ranks in order.

    Attributes:
        gpus_per_host: ranks of one side on a host.
        nic: GB/s of a rank's link to other hosts, each direction.
        nvlink: GB/s of a rank's link inside its host, each direction.
        host: GB/s that a host's ranks together reach to other hosts; None if only their own links limit it.
        colocated: engines are on the trainers' hosts; otherwise on hosts of their own, unless all fit on one.
        copy: GB/s that a GPU copies within its memory.
        pcie: GB/s that a GPU reads of its host's memory.
        shared_gpus: trainer rank i and engine rank i share a GPU, and so are on the same hosts.
    """

    gpus_per_host: int = 8
    nic: float = NIC_GB_PER_S
    nvlink: float = NVLINK_GB_PER_S
    host: float | None = None
    colocated: bool = False
    copy: float = COPY_GB_PER_S
    pcie: float = _PCIE_GB_PER_S
    shared_gpus: bool = False

    def topology(self, train_ranks: int, gen_ranks: int) -> Topology:
        """The refit world's topology, trainers first."""
        gpu_of: tuple[int, ...] = ()
        if self.shared_gpus:
            gpu_of = (*range(train_ranks), *range(gen_ranks))
        if self.colocated or self.shared_gpus:
            host_of = tuple(
                r // self.gpus_per_host for count in (train_ranks, gen_ranks) for r in range(count)
            )
        else:
            host_of = Topology.blocks(train_ranks, gen_ranks, self.gpus_per_host).host_of
        return Topology(host_of, self.nic, self.nvlink, self.host, gpu_of, self.copy)

    def describe(self, train_ranks: int, gen_ranks: int) -> str:
        """Rates, and where the ranks of the two sides are, as a line for people."""
        uplink = f", uplink {self.host:g} GB/s a host" if self.host is not None else ""
        if self.shared_gpus:
            uplink += f", copies on a GPU {self.copy:g} GB/s"
            where = "each trainer rank on the GPU of an engine's"
        elif self.topology(train_ranks, gen_ranks).hosts == 1:
            where = "all on one host"
        else:
            where = "engines on the trainers' hosts" if self.colocated else "engines on hosts of their own"
        return f"{self.gpus_per_host} GPUs a host, NIC {self.nic:g} GB/s, NVLink {self.nvlink:g} GB/s{uplink}; {where}"


def read_hosts(text: str) -> Hosts:
    """Hosts from ``key=value,…`` or from a YAML or JSON file with the same keys; the usual ones if empty.

    Raises:
        HostsError: names every part that can't be read.
    """
    if not text:
        return Hosts()
    if "=" in text and not Path(text).is_file():
        parts = [part.partition("=") for part in text.split(",") if part.strip()]
        return _hosts({key.strip(): value.strip() for key, _, value in parts})
    if not Path(text).is_file():
        raise HostsError(
            f"{text!r} is neither key=value pairs (e.g. gpus_per_host=8,nic=50) nor a YAML or JSON file with such keys"
        )
    try:
        found = OmegaConf.to_container(OmegaConf.load(text))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise HostsError(f"{text!r} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise HostsError(f"{text} holds no mapping of keys to values")
    return _hosts({str(key): str(value) for key, value in found.items()})


def _hosts(values: Mapping[str, str]) -> Hosts:
    wrong: list[str] = []
    unknown = sorted(set(values) - set(_KEYS))
    if unknown:
        wrong.append(f"{', '.join(unknown)} is none of {', '.join(_KEYS)}")

    def number(key: str, default: float) -> float:
        try:
            found = float(values.get(key, default))
        except ValueError:
            found = -1.0
        if not 0 < found < float("inf"):
            wrong.append(f"{key} is {values[key]!r}; give a number above 0")
        return found

    def flag(key: str) -> bool:
        given = values.get(key, "false").lower()
        if given not in ("true", "false"):
            wrong.append(f"{key} is {values[key]!r}; give true or false")
        return given == "true"

    gpus = values.get("gpus_per_host", "8")
    if not gpus.isdecimal() or int(gpus) < 1:
        wrong.append(f"gpus_per_host is {gpus!r}; give a whole number of at least 1")
    colocated, shared_gpus = flag("colocated"), flag("shared_gpus")
    host = None if values.get("host", "None") in ("None", "null", "") else number("host", 0.0)
    nic, nvlink = number("nic", NIC_GB_PER_S), number("nvlink", NVLINK_GB_PER_S)
    copy, pcie = number("copy", COPY_GB_PER_S), number("pcie", _PCIE_GB_PER_S)
    if wrong:
        raise HostsError("; ".join(wrong))
    return Hosts(int(gpus), nic, nvlink, host, colocated, copy, pcie, shared_gpus)

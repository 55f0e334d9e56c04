"""Priors: efficiencies, launch times and link efficiencies where nothing was measured, with their sources."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

_FILE = Path(__file__).parent / "catalogue" / "_priors.json"


class FamilyPrior(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a family reaches of the roofline.

    Attributes:
        flops_efficiency: of the dense peak, for operators with a matmul.
        bandwidth_efficiency: of the memory bandwidth.
        spread: standard deviation of the logarithm of the time.
        source: where the numbers come from, with the fit error when they were fitted; "assumed" when they were not.
    """

    flops_efficiency: float
    bandwidth_efficiency: float
    spread: float
    source: str


class LinkPrior(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a collective library reaches of a link.

    Attributes:
        bandwidth_efficiency: of the link's bandwidth, for large messages.
        ramp_bytes: the first bytes of a message, which cost twice.
        base_latency_us: of one call, beside the link's latency for each step.
        in_situ_us: what a call in a running step costs beyond one in a back-to-back sweep (skew, wake-up).
        spread: standard deviation of the logarithm of the time.
        source: where the numbers come from.
    """

    bandwidth_efficiency: float
    ramp_bytes: float
    base_latency_us: float
    in_situ_us: float
    spread: float
    source: str


class CalibrationPrior(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors that prices of one class, or whole steps, have in common: standard deviations of the logarithm.

    Attributes:
        matmul_spread, memory_spread, link_spread, host_spread: of the factor that one scalar calibrates.
        layout_spread: of a whole step beyond its prices, another for each layout.
        software_spread: of all steps of one software stack, unless measured steps calibrate it away.
        source: where the numbers come from.
    """

    matmul_spread: float
    memory_spread: float
    link_spread: float
    host_spread: float
    layout_spread: float
    software_spread: float
    source: str


class Priors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a forecast takes for granted when it has no measurement.

    Attributes:
        floor_us, cpu_floor_us: shortest time of a kernel.
        launch_us: host time to launch one operator on a GPU; `launch_spread` of its logarithm.
        view_us: host time of a view or allocation on a GPU, which launches nothing.
        cpu_gap_us: host time between two operators on a CPU; `cpu_gap_spread` of its logarithm.
        mfu: of a run about which nothing is known.
        table_spread: of a price from a published table, beside its own: inputs and clocks of the source are not the run's.
        outside_share: what rows miss beyond their largest, over what the smaller part of them misses the larger part by.
        families: by operator family; "default" for the rest.
        networks: names of link levels between nodes.
        links: by collective library, or by library and link level ("nccl:nvlink", "nccl:network" for all networks).
        calibration: what prices of a class, or whole steps, err by together.
        source: one short phrase for a list of assumptions.
    """

    floor_us: float
    cpu_floor_us: float
    launch_us: float
    launch_spread: float
    view_us: float
    cpu_gap_us: float
    cpu_gap_spread: float
    mfu: float
    networks: tuple[str, ...]
    table_spread: float
    outside_share: float
    families: dict[str, FamilyPrior]
    links: dict[str, LinkPrior]
    calibration: CalibrationPrior
    source: str
    sources: dict[str, str] = {}

    def family(self, name: str) -> FamilyPrior:
        """The prior of an operator family."""
        return self.families.get(name, self.families["default"])

    def link(self, backend: str, level: str = "") -> LinkPrior:
        """The prior of a collective library on a link level: its own, else of any network, of the library, the default."""
        names = (f"{backend}:{level}", f"{backend}:network" if level in self.networks else "", backend)
        return next((self.links[name] for name in names if name in self.links), self.links["default"])


@lru_cache(maxsize=1)
def load_priors() -> Priors:
    """The priors that ship with the package."""
    return msgspec.json.decode(_FILE.read_bytes(), type=Priors)

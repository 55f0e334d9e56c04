"""Options that bring measurements into a forecast: tables of a device, and runs to calibrate with."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmprof.errors import TableError

if TYPE_CHECKING:
    from llmprof.extrapolate.calibration import Calibration
    from llmprof.schema.cluster import Cluster
    from llmprof.schema.profile import Profile


def add_tables(parser: argparse.ArgumentParser) -> None:
    """Declare `--calibrate-with` and `--measured`."""
    parser.add_argument(
        "--calibrate-with",
        metavar="FILE",
        help="table of runs measured on such devices (CSV, as for validate), to correct assumed prices",
    )
    parser.add_argument(
        "--measured",
        metavar="TABLE",
        action="append",
        default=[],
        help="times of such a device, by llmprof measure -o or llmprof import; give it several times",
    )


def with_tables(profile: Profile, args: argparse.Namespace) -> tuple[Profile, Cluster]:
    """The profile with the tables of `--measured`, and the cluster of `--cluster`.

    Raises:
        TableError: a table is of another device than the cluster's.
    """
    from llmprof.schema.catalogue import load_cluster
    from llmprof.schema.measurements import read_measurements, with_measurements

    captured = profile
    for table in args.measured:
        profile = with_measurements(profile, read_measurements(table))
    # "local" is where the run was captured; a model that nobody ran has no machine but the tables'
    cluster = load_cluster(args.cluster, profile=captured if captured.sources else profile)
    for table in args.measured:
        _check_table(table, cluster)
    return profile, cluster


def _check_table(path: str, cluster: Cluster) -> None:
    """Check that a table was measured on the cluster's device.

    Raises:
        TableError: with both devices.
    """
    from llmprof.extrapolate.compute import is_device
    from llmprof.schema.measurements import machine, read_measurements

    source = read_measurements(path).source
    if not is_device(source, cluster.device):
        raise TableError(
            f"{path} was measured on {machine(source)}, and the forecast is for {cluster.device.name}",
            hint="times of one device never price another: leave it out, or name its own cluster",
        )


def calibration_of(cluster: Cluster, args: argparse.Namespace) -> Calibration | None:
    """What the runs of `--calibrate-with` say; None without it."""
    if not args.calibrate_with:
        return None
    from llmprof.judge.calibrated import calibration_from

    return calibration_from(args.calibrate_with, cluster.device)

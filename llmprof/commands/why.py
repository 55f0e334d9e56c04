"""`--why OP` of `show` and `forecast`: the prices of an operator's calls and the measured rows they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmprof.errors import RequestError

if TYPE_CHECKING:
    from llmprof.extrapolate.calibration import Calibration
    from llmprof.schema.cluster import Cluster
    from llmprof.schema.layout import Layout
    from llmprof.schema.profile import Profile

HELP = "prices of an operator's calls (a name, or 'NAME SHAPES') and the measured rows they come from"
_SHOWN = 5


def why_run(profile: Profile, text: str) -> dict[str, Any]:
    """Prices on the device on which a run was measured.

    Raises:
        RequestError: it is a saved forecast, or has no such operator.
    """
    from llmprof.extrapolate.compute import OperatorPrices
    from llmprof.extrapolate.why import read_asked, why_measured
    from llmprof.schema.catalogue import load_cluster

    if profile.manifest.kind != "measured":
        raise RequestError(
            "the run is a saved forecast, which does not keep the rows behind its prices",
            hint="give --why to `llmprof forecast`",
        )
    device = load_cluster("local", profile=profile).device
    prices = OperatorPrices(profile, device, same_device=True)
    return {
        "asked": text,
        "device": device.name,
        "layout": "",
        "calls": why_measured(profile, prices, read_asked(text)),
    }


def why_layouts(
    profile: Profile,
    layouts: Sequence[Layout],
    cluster: Cluster,
    text: str,
    *,
    calibration: Calibration | None,
    sizes: tuple[int | None, int | None],
) -> list[dict[str, Any]]:
    """Prices that forecasts of some layouts take.

    Args:
        sizes: sequences in a step and tokens in a sequence, None for the captured ones.

    Raises:
        RequestError: a layout cannot be forecast, or has no such operator.
    """
    from llmprof.extrapolate.forecast import Forecaster
    from llmprof.extrapolate.why import read_asked, why_forecast

    asked, (global_batch, seq) = read_asked(text), sizes
    forecaster = Forecaster(profile, cluster, calibration=calibration)
    return [
        {
            "asked": text,
            "device": cluster.device.name,
            "layout": str(layout),
            "calls": why_forecast(forecaster.simulate(layout, global_batch=global_batch, seq=seq), asked),
        }
        for layout in layouts
    ]


def print_why(answers: Sequence[dict[str, Any]], *, as_json: bool, top: int | None = None) -> None:
    """Print the answers: one object, or {"why": [...]} for several layouts."""
    from llmprof.commands.output import console, print_json

    if as_json:
        shown = [{**answer, "calls": answer["calls"][:top]} for answer in answers]
        print_json(shown[0] if len(shown) == 1 else {"why": shown})
        return
    from llmprof.report.why_text import why_text

    out = console()
    for answer in answers:
        out.print(why_text(answer, top=top or _SHOWN))

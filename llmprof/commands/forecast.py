"""`llmprof forecast RUN`: what the step of a run, or of a model by its sizes, would be on machines and layouts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmprof.commands.request import number_of_tokens, parse_layouts, positive_int
from llmprof.commands.subject import add_subject, load_subject
from llmprof.commands.tables import add_tables, calibration_of, with_tables
from llmprof.commands.why import HELP, print_why, why_layouts
from llmprof.errors import NoAnswerError

if TYPE_CHECKING:
    from llmprof.schema.cluster import Cluster
    from llmprof.schema.layout import Layout
    from llmprof.schema.profile import Profile

SUMMARY = "what the step would be on N GPUs of a cluster with a layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_subject(parser)
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="catalogue name, path of a .json file, or local"
    )
    parser.add_argument(
        "--layout",
        required=True,
        action="append",
        metavar="L",
        help="such as dp=8,zero=3,tp=8; give it several times to compare",
    )
    parser.add_argument(
        "--gpus", type=positive_int, metavar="N", help="number of GPUs, to check the layout against"
    )
    parser.add_argument(
        "--global-batch", type=positive_int, metavar="B", help="sequences per step (default: as captured)"
    )
    parser.add_argument(
        "--seq", type=positive_int, metavar="S", help="tokens per sequence (default: as captured)"
    )
    parser.add_argument(
        "--tokens", type=number_of_tokens, metavar="T", help="tokens of the whole run, such as 300B"
    )
    add_tables(parser)
    parser.add_argument("--why", metavar="OP", help=f"instead of the forecast: {HELP}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--save", metavar="DIR", help="keep the predicted profile, for show, compare and export"
    )
    parser.add_argument(
        "--tb", metavar="LOGDIR", help="write the forecast for the LLMPROF tab of TensorBoard"
    )


def execute(args: argparse.Namespace) -> int:
    """Print one forecast, or several side by side; 3 when none of them fits."""
    layouts = parse_layouts(args.layout, gpus=args.gpus)
    profile, cluster = with_tables(load_subject(args, layouts), args)
    if args.why is not None:
        known, sizes = calibration_of(cluster, args), (args.global_batch, args.seq)
        answers = why_layouts(profile, layouts, cluster, args.why, calibration=known, sizes=sizes)
        print_why(answers, as_json=args.json)
        return 0
    predictions = _predict(profile, layouts, cluster, args)
    forecasts = [_forecast_of(prediction) for prediction in predictions]
    if args.save:
        _save(predictions, layouts, Path(args.save))
    if args.tb:
        from llmprof.tensorboard.writer import write_report

        write_report(args.tb, run=profile.manifest.name or "run", profile=profile, forecasts=predictions)
    _print(forecasts, cluster, args)
    return NoAnswerError.exit_code if all(f["verdict"] == "oom" for f in forecasts) else 0


def _predict(
    profile: Profile, layouts: list[Layout], cluster: Cluster, args: argparse.Namespace
) -> list[Profile]:
    from llmprof.extrapolate.predict import predict

    calibration = calibration_of(cluster, args)
    asked = {"global_batch": args.global_batch, "seq": args.seq, "tokens": args.tokens}
    return [predict(profile, layout, cluster, calibration=calibration, **asked) for layout in layouts]


def _forecast_of(prediction: Profile) -> dict[str, Any]:
    forecast = prediction.manifest.forecast
    assert forecast is not None, "a predicted profile carries its forecast"
    return forecast


def _save(predictions: list[Profile], layouts: list[Layout], directory: Path) -> None:
    """One forecast in the directory itself, several each in a subdirectory named by its layout."""
    from llmprof.schema.store import save_profile

    for prediction, layout in zip(predictions, layouts, strict=True):
        save_profile(
            prediction, directory if len(layouts) == 1 else directory / str(layout).replace(":", "-")
        )


def _print(forecasts: list[dict[str, Any]], cluster: Cluster, args: argparse.Namespace) -> None:
    from llmprof.report.ranking import best_forecast

    if args.json:
        from llmprof.commands.output import print_json

        best = best_forecast(forecasts)
        print_json(
            forecasts[0]
            if len(forecasts) == 1
            else {"forecasts": forecasts, "best": best["layout"] if best else None}
        )
        return
    from llmprof.commands.output import console
    from llmprof.report.forecast_text import assumptions_text, comparison_text, forecast_card

    out = console()
    alone = len(forecasts) == 1
    for forecast in forecasts:
        out.print(forecast_card(forecast, cluster, with_assumptions=alone))
    if not alone:
        out.print(assumptions_text(forecasts))
        out.print(comparison_text(forecasts))

"""`llmprof run -- train.py ...`: run a training script unchanged and capture it."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING

from llmprof.errors import RunError

if TYPE_CHECKING:
    from llmprof.hooks.options import SessionOptions

SUMMARY = "run a training script and capture it; its exit code is kept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the capture, then what to run."""
    parser.add_argument(
        "-o", "--output", default="runs/llmprof", metavar="DIR", help="where the run is written"
    )
    parser.add_argument("--wait", type=int, default=5, help="steps that are not averaged (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="further steps before the window (default 2)")
    parser.add_argument("--active", type=int, default=3, help="steps in the profiled window (default 3)")
    parser.add_argument("--repeat", type=int, default=1, help="number of windows (default 1)")
    parser.add_argument("--no-workload", action="store_true", help="do not trace the model for forecasts")
    parser.add_argument("--json", action="store_true", help="print one JSON object when the script has ended")
    parser.add_argument(
        "target",
        nargs=argparse.REMAINDER,
        metavar="-- train.py ...",
        help="a script, `-m module`, or a launcher such as torchrun, with its arguments",
    )


def execute(args: argparse.Namespace) -> int:
    """Run the script; returns its exit code."""
    from llmprof.hooks.launch import parse_target, run_in_process, run_launcher
    from llmprof.hooks.options import make_options

    words = args.target[1:] if args.target[:1] == ["--"] else args.target
    target = parse_target(words)
    options: SessionOptions = {
        "logdir": os.path.abspath(args.output),
        "wait": args.wait,
        "warmup": args.warmup,
        "active": args.active,
        "repeat": args.repeat,
        "workload": not args.no_workload,
    }
    make_options(options)  # complain before the script starts
    enabled = os.environ.get("LLMPROF", "1") != "0"
    _show_progress()
    if target.kind == "launcher":
        code = run_launcher(target, options, enabled=enabled)
    else:
        code = run_in_process(target, options, enabled=enabled)
    if enabled and os.environ.get("RANK", "0") == "0":
        _report(args, code, is_told=target.kind != "launcher")
    return code


def _show_progress() -> None:
    logger = logging.getLogger("llmprof")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _report(args: argparse.Namespace, code: int, *, is_told: bool) -> None:
    """Say on stderr where the run is, or why there is none; on stdout only what `--json` asks for."""
    from llmprof.commands.output import console, print_json
    from llmprof.schema.store import load_profile

    try:
        profile = load_profile(args.output)
    except RunError as error:
        steps, status, problem = 0, "missing", error.message
    else:
        steps, status, problem = len({r.step for r in profile.steps}), profile.manifest.status, ""
    if args.json:
        print_json({"run": str(args.output), "exit_code": code, "status": status, "steps": steps})
    elif steps and not is_told:
        console(stderr=True).print(
            f"llmprof: {steps} steps captured; see: llmprof show {args.output}", soft_wrap=True
        )
    elif not steps:
        hint = problem or "call session.step() in the loop, or decorate the function that trains"
        if code:
            hint = f"the script ended with exit code {code}"
        console(stderr=True).print(f"llmprof: no step was seen ({hint})", soft_wrap=True)

"""What a forecast starts from: a run, a Workload file, a model typed as its sizes, or a Hugging Face `config.json`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmprof.commands.request import load_run
from llmprof.errors import RequestError, WorkloadError

if TYPE_CHECKING:
    from llmprof.schema.layout import Layout
    from llmprof.schema.model import ModelShape
    from llmprof.schema.profile import Profile

IMPLEMENTATIONS = ("eager", "plain", "compile", "megatron", "te")
_MAX_CONFIG_BYTES = 10_000_000


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Declare RUN, `--model` and `--implementation`."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="run directory of a capture, a workload file, or the config.json of a Hugging Face model",
    )
    parser.add_argument(
        "--model",
        metavar="FAMILY:SIZES",
        help="instead of RUN: a decoder by its sizes, such as llama:layers=32,hidden=4096,heads=32",
    )
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="how a model that was not captured is programmed (default: eager)",
    )


def load_subject(args: argparse.Namespace, layouts: Iterable[Layout]) -> Profile:
    """The Profile of the subject that was asked: measured, or a Workload without measurements.

    Args:
        args: with the options of `add_subject`.
        layouts: what will be asked of it: a reference decoder is derived at their degrees.

    Raises:
        RequestError: not exactly one subject, or an option that does not go with it.
        RunError, WorkloadError: the subject cannot be read.
    """
    _check_one(args)
    found = _shape(args)
    if found is not None:
        shape, notes = found
        return _reference(shape, notes, layouts, implementation=args.implementation or "eager")
    if args.implementation:
        raise RequestError(
            f"--implementation {args.implementation} is for models that were not captured, but {args.run} was",
            hint="leave it out, or give --model",
        )
    return _captured(args.run)


def load_subject_at_degrees(args: argparse.Namespace, degrees: Iterable[int]) -> Profile:
    """The subject; one that was not captured is derived at those tensor-parallel degrees that divide it.

    Raises:
        RequestError, RunError, WorkloadError: as `load_subject`.
    """
    from llmprof.schema.layout import Layout
    from llmprof.schema.reference import tensor_parallel_problem

    _check_one(args)
    found = _shape(args)
    if found is None:
        return load_subject(args, [])
    possible = [tp for tp in degrees if not tensor_parallel_problem(found[0], tp)]
    return load_subject(
        args, [Layout(tp=tp, sp=sp) for tp in possible for sp in (False, True) if tp > 1 or not sp]
    )


def _check_one(args: argparse.Namespace) -> None:
    if bool(args.run) == bool(args.model):
        asked = "both a run and --model were given" if args.run else "neither a run nor --model was given"
        raise RequestError(f"{asked}: a forecast starts from one subject", hint="give one of them")


def _captured(path: str) -> Profile:
    """A run directory, or a Workload file without measurements."""
    from llmprof.schema.profile import unmeasured
    from llmprof.schema.store import load_workload

    if _is_json(path):
        return unmeasured(load_workload(path))
    from llmprof.schema.measurements import with_own_measurements

    return with_own_measurements(load_run(path), Path(path))


def _is_json(path: str) -> bool:
    return Path(path).suffix == ".json" and Path(path).is_file()


def _shape(args: argparse.Namespace) -> tuple[ModelShape, tuple[str, ...]] | None:
    """The shape that was typed or is described in a config.json, with its assumptions; None for a capture."""
    from llmprof.schema.hf_config import read_hf_config
    from llmprof.schema.model import read_model

    path = args.model or args.run
    config = _read_config(path) if _is_json(path) else None
    if config is not None:
        return read_hf_config(config)
    if not args.model:
        return None
    if _is_json(path):
        raise WorkloadError(
            f"{path} is not the config.json of a model: it has no model_type", hint="see --help"
        )
    read = read_model(args.model)
    return read.shape, ((read.assumption,) if read.assumption else ())


def _read_config(path: str) -> dict[str, Any] | None:
    """The object of a config.json; None when the file is something else, such as a Workload."""
    import msgspec

    if Path(path).stat().st_size > _MAX_CONFIG_BYTES:
        return None
    try:
        data = msgspec.json.decode(Path(path).read_bytes())
    except (msgspec.DecodeError, RecursionError):
        return None
    return data if isinstance(data, dict) and "model_type" in data else None


def _reference(
    shape: ModelShape, notes: tuple[str, ...], layouts: Iterable[Layout], *, implementation: str
) -> Profile:
    import msgspec

    from llmprof.extrapolate.implementation import apply_implementation
    from llmprof.schema.profile import unmeasured
    from llmprof.schema.reference import reference_workload

    degrees = dict.fromkeys((layout.tp, layout.sp) for layout in layouts)
    workload = apply_implementation(reference_workload(shape, degrees=degrees), implementation)
    workload = msgspec.structs.replace(workload, source="reference", warnings=(*workload.warnings, *notes))
    return unmeasured(workload)

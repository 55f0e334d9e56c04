"""Makes the prices agree with the measured step: what the rows of the profiled window add up to, against steps outside it."""

from __future__ import annotations

from llmprof.errors import RequestError
from llmprof.extrapolate.baselines import step_time_us
from llmprof.extrapolate.compute import OperatorPrices
from llmprof.extrapolate.partition import Plan, partition
from llmprof.extrapolate.precision import PrecisionRule
from llmprof.schema.layout import Layout
from llmprof.schema.profile import Profile

SCALE_LIMITS = (0.5, 1.5)
"""Factors beyond these are no disturbance by profiling: the rows and the steps are about different things."""
WRAPPER_ROW = "dtensor_dispatch_us_per_op"
ASSUMED_WRAPPER_US = 42.0
"""Host time of an operator on a DTensor beyond the local one; measured on one CPU, assumed elsewhere."""


def window_scale(profile: Profile, operators: OperatorPrices) -> float:
    """Factor on operator and host times; 1.0 when it cannot be known.

    Operators are timed while profiling is on and the machine may have been slower (or faster) then. For a run
    of one rank on a CPU, the uninstrumented steps over the sum of the prices of the same step is that factor.
    """
    workload, step_us = profile.workload, step_time_us(profile)
    if workload is None or step_us is None or profile.manifest.world_size != 1 or not profile.operators:
        return 1.0
    if operators.device.kind != "cpu" or not operators.same_device:
        return 1.0
    rule = PrecisionRule(captured=workload.precision, target=workload.precision)
    layout = Layout(mb=workload.batch, accum=workload.accum)
    try:
        plan = partition(workload, layout, seq=workload.seq, precision=rule)
    except RequestError:
        return 1.0
    input_us = _input_us(profile)
    priced_us = _priced_us(plan, operators)
    scale = (step_us - input_us) / priced_us if priced_us else 1.0
    return scale if SCALE_LIMITS[0] <= scale <= SCALE_LIMITS[1] else 1.0


def _priced_us(plan: Plan, operators: OperatorPrices) -> float:
    total = 0.0
    for name, count in plan.stages[0]:
        layer = plan.layers[name]
        for op in (*layer.forward, *layer.backward, *layer.optimizer):
            times = 1 if op.phase == "optimizer" else plan.layout.accum
            price = operators.price(op.op, op.inputs, op.outputs, op.attributes)
            total += (price.time_s + price.host_s) * op.count * count * times
    return total * 1e6


def _input_us(profile: Profile) -> float:
    rows = [r for r in profile.phases if r.phase == "input"]
    steps = {(r.rank, r.step) for r in rows}
    return sum(r.exclusive_us for r in rows) / len(steps) if steps else 0.0


def wrapper_us(profile: Profile, *, same_device: bool) -> tuple[float, str]:
    """Host time that a DTensor costs one operator, and its kind of evidence."""
    rows = [r for r in profile.host if r.name == WRAPPER_ROW]
    if same_device and rows:
        return sum(r.value for r in rows) / len(rows), "measured"
    return ASSUMED_WRAPPER_US, "assumed"

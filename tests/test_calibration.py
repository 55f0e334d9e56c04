"""Shifts of four shared factors from measured steps: recovered, shrunk, robust, and what they do to a forecast."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp, log, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from llmprof.errors import RequestError
from llmprof.extrapolate.calibration import CLASSES, Calibration, Observation, class_of, fit_calibration
from llmprof.extrapolate.forecast import Forecaster
from llmprof.extrapolate.predict import BREAKDOWN, predict
from llmprof.extrapolate.uncertainty import Factors, interval
from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import Layout
from tests.workloads import cpu_cluster, gpu_cluster, profile

Array = NDArray[np.float64]
PRIOR = Calibration.prior()
NOISE = PRIOR.layout_spread
TRUTH = np.array([0.15, -0.10, 0.25, 0.10])
MIXES = (
    (1.0, 0.0, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 0.0),
    (0.0, 0.0, 0.0, 1.0),
    (0.6, 0.2, 0.2, 0.0),
    (0.4, 0.3, 0.2, 0.1),
)


def step(
    name: str, mix: tuple[float, ...], measured: float | None = None, *, error: float = 0.0
) -> Observation:
    """A row whose nominal step is the sum of `mix` (seconds by class); measured at TRUTH unless given."""

    def nominal_s(shifts: Array) -> Array:
        return np.asarray(np.exp(shifts) @ np.array(mix))

    true = float(nominal_s(TRUTH[None])[0]) * exp(error)
    return Observation(name=name, step_s=true if measured is None else measured, nominal_s=nominal_s)


def rows(count: int, *, seed: int = 0, noise: float = 0.0) -> list[Observation]:
    """`count` rows of mixed work at TRUTH."""
    generator = np.random.default_rng(seed)
    return [
        step(f"row {i}", MIXES[i % len(MIXES)], error=noise * float(generator.standard_normal()))
        for i in range(count)
    ]


def deviations(calibration: Calibration) -> Array:
    """Standard deviations of the classes."""
    return np.asarray(np.sqrt(np.diag(calibration.covariance)))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("matmul:assumed", "matmul"),
        ("attention:assumed", "matmul"),
        ("elementwise:assumed", "memory"),
        ("optimizer:assumed", "memory"),
        ("link:nvlink:assumed", "link"),
        ("host:assumed", "host"),
    ],
)
def test_assumed_prices_belong_to_a_class(name: str, found: str) -> None:
    index = class_of(name)
    assert index is not None
    assert CLASSES[index] == found


@pytest.mark.parametrize(
    "name",
    [
        "matmul:measured",
        "link:nvlink:interpolated",
        "host:measured",
        "straggler",
        "input",
        "memory:activations",
    ],
)
def test_what_was_measured_is_left_alone(name: str) -> None:
    assert class_of(name) is None


def test_no_rows_leave_the_prior() -> None:
    assert fit_calibration([], prior=PRIOR) is PRIOR
    found = fit_calibration([])
    assert np.array_equal(found.shifts, np.zeros(4))
    assert np.array_equal(found.covariance, PRIOR.covariance)
    assert (found.rows, found.sentence()) == (0, "")


def test_one_dimension_shrinks_as_by_hand() -> None:
    # one row of matmul alone, 5 % slow: a linear model in the logarithm, so the weight is p / (p + noise) with
    # variances p and noise
    found = fit_calibration([step("one", (2.0, 0.0, 0.0, 0.0), 2.0 * exp(0.05))])
    p = float(PRIOR.covariance[0, 0])
    weight = p / (p + NOISE**2)
    assert found.shifts[0] == pytest.approx(0.05 * weight, rel=1e-6)
    assert found.covariance[0, 0] == pytest.approx(p * (1 - weight), rel=1e-6)
    assert np.array_equal(found.shifts[1:], np.zeros(3))
    assert np.allclose(found.covariance[1:, 1:], PRIOR.covariance[1:, 1:])


def test_an_uncertain_row_counts_less() -> None:
    sure = step("one", (1.0, 0.0, 0.0, 0.0), 1.2)
    vague = replace(sure, spread=0.3)
    assert 0 < fit_calibration([vague]).shifts[0] < 0.5 * fit_calibration([sure]).shifts[0]


def test_one_row_moves_most_what_dominates_it() -> None:
    found = fit_calibration([step("one", (0.9, 0.05, 0.05, 0.0), 1.15)])
    assert found.shifts[0] > 5 * max(abs(found.shifts[1]), abs(found.shifts[2]))
    assert found.shifts[3] == 0.0


def test_enough_rows_find_the_truth() -> None:
    found = fit_calibration(rows(120, noise=NOISE))
    error = np.abs(found.shifts - TRUTH)
    assert np.all(error < 3 * deviations(found))
    assert np.all(error < 0.05)
    assert found.rows == 120
    assert found.layout_spread == pytest.approx(NOISE, rel=0.25)


def test_covariance_is_positive_and_narrows_with_rows() -> None:
    before = deviations(PRIOR)
    for count in (1, 4, 12, 48):
        found = fit_calibration(rows(count))
        assert np.all(np.linalg.eigvalsh(found.covariance) > 0)
        assert np.allclose(found.covariance, found.covariance.T)
        after = deviations(found)
        assert np.all(after <= before + 1e-12)
        assert after.sum() < before.sum()
        before = after


def test_the_order_of_rows_does_not_matter() -> None:
    forward = rows(10, noise=NOISE)
    one, other = fit_calibration(forward), fit_calibration(forward[::-1])
    assert np.array_equal(one.shifts, other.shifts)
    assert np.array_equal(one.covariance, other.covariance)


def test_one_wild_row_does_not_lead() -> None:
    good = rows(12, noise=0.02)
    calm = fit_calibration(good)
    wild = fit_calibration([*good, step("wild", MIXES[4], 30.0)])
    assert np.abs(wild.shifts - calm.shifts).max() < 0.05
    assert wild.residual > 0.5
    assert wild.layout_spread < 2 * NOISE


def test_rows_that_disagree_widen_the_model_error() -> None:
    noisy = fit_calibration(rows(24, noise=0.25))
    assert noisy.layout_spread > 1.5 * NOISE
    assert fit_calibration(rows(24)).layout_spread < NOISE


def test_a_kink_between_hidden_and_exposed_work_is_survived() -> None:
    # links beside matmuls: the step is the longer of both, so a link's sensitivity is 0 or 1
    def nominal_s(shifts: Array) -> Array:
        return np.asarray(np.maximum(np.exp(shifts[:, 0]), 1.05 * np.exp(shifts[:, 2])) + 0.2)

    true = float(nominal_s(TRUTH[None])[0])
    found = fit_calibration(Observation(name=str(i), step_s=true, nominal_s=nominal_s) for i in range(8))
    assert log(float(nominal_s(found.shifts[None])[0]) / true) == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("measured", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_that_is_no_time_is_refused(measured: float) -> None:
    with pytest.raises(RequestError, match="measured step of bad"):
        fit_calibration([step("bad", (1.0, 0.0, 0.0, 0.0), measured)])


def test_the_sentence_names_factors_and_file() -> None:
    found = replace(PRIOR, shifts=np.log([0.91, 1.1, 0.8, 1.3]), rows=4, residual=0.034, source="runs.csv")
    assert found.sentence() == (
        "calibrated on 4 rows of runs.csv; times: matmul x0.91, memory x1.10, link x0.80, host x1.30; "
        "steps remain 3% off (rms)"
    )


def test_before_calibration_a_factor_has_its_family_s_spread() -> None:
    factors = Factors(draws=50_000)
    for name, spread in (("matmul:assumed", 0.4), ("link:nvlink:assumed", 0.5), ("optimizer:assumed", 0.3)):
        found = factors.factor(name, spread)
        assert found[0] == 1.0
        assert float(np.log(found[1:]).std()) == pytest.approx(spread, rel=0.02)


def test_factors_of_a_class_err_together() -> None:
    factors = Factors(draws=50_000)
    one, other = (np.log(factors.factor(f"{n}:assumed", 0.3)[1:]) for n in ("matmul", "attention"))
    # both have variance 0.3^2, of which the class's is common
    expected = float(PRIOR.covariance[0, 0]) / 0.3**2
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(expected, abs=0.02)
    link = np.log(factors.factor("link:nvlink:assumed", 0.3)[1:])
    assert abs(np.corrcoef(one, link)[0, 1]) < 0.02


def test_calibrated_factors_carry_shift_and_covariance() -> None:
    covariance = np.diag([0.01, 0.02, 0.03, 0.04])
    covariance[0, 1] = covariance[1, 0] = -0.008
    known = replace(PRIOR, shifts=TRUTH, covariance=covariance, rows=4)
    factors = Factors(draws=50_000, calibration=known)
    matmul, memory = factors.factor("matmul:assumed", 0.01), factors.factor("elementwise:assumed", 0.01)
    assert matmul[0] == pytest.approx(exp(0.15)) == factors.nominal("matmul:assumed")
    logs = np.stack([np.log(matmul[1:]), np.log(memory[1:])])
    assert np.allclose(logs.mean(axis=1), TRUTH[:2], atol=0.005)
    assert np.allclose(np.cov(logs), covariance[:2, :2], atol=0.0005)
    assert factors.factor("matmul:measured", 0.1)[0] == 1.0


def test_the_model_error_is_partly_common_to_layouts() -> None:
    cold = Factors(draws=50_000)
    one, other = (np.log(cold.model(name)[1:]) for name in ("dp=8", "dp=4,tp=2"))
    assert cold.model("dp=8")[0] == 1.0
    assert float(one.std()) == pytest.approx(PRIOR.model_spread, rel=0.02)
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(
        PRIOR.software_spread**2 / PRIOR.model_spread**2, abs=0.02
    )
    warm = Factors(draws=50_000, calibration=fit_calibration(rows(4)))
    one, other = (np.log(warm.model(name)[1:]) for name in ("dp=8", "dp=4,tp=2"))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_draws_depend_on_the_seed_alone() -> None:
    known = fit_calibration(rows(4))
    one, same = (Factors(seed=3, calibration=known).factor("matmul:assumed", 0.3) for _ in range(2))
    other = Factors(seed=4, calibration=known).factor("matmul:assumed", 0.3)
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_intervals_cover_what_they_promise_on_worlds_drawn_from_the_prior() -> None:
    """80 % of the steps of drawn worlds lie in the interval of four calibration rows of the same world."""
    generator = np.random.default_rng(5)
    mix = np.array((0.5, 0.25, 0.2, 0.05))
    inside = 0
    worlds = 400
    for _ in range(worlds):
        truth = deviations(PRIOR) * generator.standard_normal(4)
        errors = NOISE * generator.standard_normal(5)
        seen = [
            step(str(i), m, float(np.array(m) @ np.exp(truth)) * exp(errors[i]))
            for i, m in enumerate(MIXES[2:])
        ]
        known = replace(fit_calibration(seen), layout_spread=NOISE)
        factors = Factors(draws=300, calibration=known)
        names = ("matmul:assumed", "elementwise:assumed", "link:x:assumed", "host:assumed")
        total = sum(m * factors.factor(name, 0.0) for m, name in zip(mix, names, strict=True))
        found = interval(np.asarray(total) * factors.model("dp=8"))
        inside += found.p10 <= float(mix @ np.exp(truth)) * exp(errors[4]) <= found.p90
    # four standard deviations of a binomial around 0.8
    assert inside / worlds == pytest.approx(0.8, abs=4 * sqrt(0.16 / worlds))


def shifted(**shifts: float) -> Calibration:
    """A calibration on four rows that is certain of these shifts."""
    values = np.array([shifts.get(name, 0.0) for name in CLASSES])
    return replace(PRIOR, shifts=values, covariance=1e-6 * np.eye(4), rows=4, software_spread=0.0)


LAYOUTS = ("dp=1,mb=2", "dp=4,zero=3,shard=2,tp=2", "pp=4,accum=8,schedule=gpipe", "dp=2,mb=2,recompute=full")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cluster", [gpu_cluster(), cpu_cluster()], ids=["gpu", "cpu"])
def test_a_calibrated_forecast_still_adds_up(layout: str, cluster: Cluster) -> None:
    known = shifted(matmul=0.2, memory=-0.1, link=0.3, host=0.4)
    predicted = predict(profile(), Layout.parse(layout), cluster, calibration=known)
    found = predicted.manifest.forecast
    assert found is not None
    assert tuple(found["breakdown_s"]) == BREAKDOWN
    p50 = found["step_time_s"]["p50"]
    assert sum(found["breakdown_s"].values()) == pytest.approx(p50, rel=1e-12)
    shares = [found[f"{kind}_fraction"] for kind in ("measured", "interpolated", "assumed")]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0.0
    assert sum(r.exclusive_us for r in predicted.phases if r.rank == 0) == pytest.approx(p50 * 1e6, rel=1e-9)
    assert any(line.startswith("calibrated on 4 rows") for line in found["assumptions"])


def test_equal_shifts_of_all_classes_scale_what_is_priced() -> None:
    # on a CPU of one rank everything but waiting is priced: twice the time
    layout = Layout.parse("dp=1,mb=2")
    double = log(2.0)
    known = shifted(matmul=double, memory=double, link=double, host=double)
    cold, warm = (predict(profile(), layout, cpu_cluster(), calibration=c) for c in (None, known))
    assert warm.manifest.forecast is not None
    assert cold.manifest.forecast is not None
    ratio = warm.manifest.forecast["step_time_s"]["p50"] / cold.manifest.forecast["step_time_s"]["p50"]
    assert ratio == pytest.approx(2.0, rel=1e-9)
    assert sum(r.time_us for r in warm.operators) == pytest.approx(2 * sum(r.time_us for r in cold.operators))
    assert sum(r.host_us or 0.0 for r in warm.operators) == pytest.approx(
        2 * sum(r.host_us or 0.0 for r in cold.operators)
    )


def test_a_shift_of_links_moves_communication_alone() -> None:
    layout = Layout.parse("tp=2,mb=2")
    cold, warm = (
        predict(profile(), layout, cpu_cluster(), calibration=c) for c in (shifted(), shifted(link=log(3.0)))
    )
    assert cold.manifest.forecast is not None
    assert warm.manifest.forecast is not None
    before, after = cold.manifest.forecast["breakdown_s"], warm.manifest.forecast["breakdown_s"]
    assert after["tp"] == pytest.approx(3 * before["tp"])
    assert after["compute"] == pytest.approx(before["compute"])
    assert sum(r.time_us for r in warm.collectives) == pytest.approx(
        3 * sum(r.time_us for r in cold.collectives)
    )


def observations(cluster: Cluster, truth: Array) -> list[Observation]:
    """Steps of four layouts in a world with these shifts, measured without error."""
    forecaster = Forecaster(profile(), cluster)

    def steps_s(text: str, shifts: Array) -> Array:
        return forecaster.probing(shifts).simulate(Layout.parse(text)).step_s

    found = []
    for text in ("dp=1,mb=2", "dp=2,accum=4", "tp=2,mb=2", "dp=2,zero=3,accum=2"):
        nominal_s = partial(steps_s, text)
        found.append(Observation(name=text, step_s=float(nominal_s(truth[None])[0]), nominal_s=nominal_s))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cluster", [gpu_cluster(), cpu_cluster()], ids=["gpu", "cpu"])
def test_probes_are_the_nominal_steps_of_their_shifts(layout: str, cluster: Cluster) -> None:
    forecaster, at = Forecaster(profile(), cluster), Layout.parse(layout)
    shifts = np.stack([np.zeros(4), TRUTH, np.array([0.0, 0.0, 0.5, 0.0])])
    alone = [forecaster.recalibrated(replace(PRIOR, shifts=row)).simulate(at).step_s[0] for row in shifts]
    together = forecaster.probing(shifts).simulate(at).step_s
    assert together[0] == pytest.approx(alone[0], rel=1e-12)
    # what is hidden, and lost to interference, is that of the first set
    assert np.allclose(together, alone, rtol=0.01)


@pytest.mark.parametrize("cluster", [gpu_cluster(), cpu_cluster()], ids=["gpu", "cpu"])
def test_forecasts_of_a_shifted_world_come_closer_and_narrow(cluster: Cluster) -> None:
    truth = np.array([0.2, 0.1, 0.2, 0.1])
    seen = observations(cluster, truth)
    known = fit_calibration(seen, source="runs.csv")
    layout = Layout.parse("dp=2,zero=3,tp=2,accum=2")
    world_s = float(Forecaster(profile(), cluster).probing(truth[None]).simulate(layout).step_s[0])
    cold, warm = (Forecaster(profile(), cluster, calibration=c).simulate(layout) for c in (None, known))
    errors = [abs(log(float(s.step_s[0]) / world_s)) for s in (cold, warm)]
    assert errors[1] < 0.5 * errors[0]
    widths = [log(interval(s.step_s).p90 / interval(s.step_s).p10) for s in (cold, warm)]
    assert widths[1] < widths[0]
    assert cold.evidence["interpolated"] == 0.0
    # on the GPU these small steps wait for the host, so they say little about the device's work
    assert 0.0 < warm.evidence["interpolated"] < 1.0
    assert cluster.device.kind == "cuda" or warm.evidence["interpolated"] > 0.2
    again = Forecaster(profile(), cluster).recalibrated(known).simulate(layout)
    assert np.array_equal(again.step_s, warm.step_s)

// How a family of layouts scales: one curve over the number of GPUs with its p10 to p90 band.

import { axis, chart, tooltip } from "./charts.js";
import { card, segmented } from "./dom.js";
import {
  count,
  isNumber,
  list,
  numbers,
  percent,
  plain,
  range,
  seconds,
  short,
  text,
  tokensPerS,
} from "./format.js";
import { color, seriesColor } from "./theme.js";

const MAX_SERIES = 6;

const METRICS = {
  per_gpu: {
    label: "tokens/s per GPU",
    axis: plain,
    format: tokensPerS,
    of: (f) => Object.fromEntries(numbers(f.tokens_per_s).map(([k, v]) => [k, v / f.gpus])),
    ideal: (first) => first.p50,
  },
  rate: {
    label: "tokens/s",
    axis: plain,
    format: tokensPerS,
    of: (f) => f.tokens_per_s ?? {},
    ideal: (first, times) => first.p50 * times,
  },
  time: { label: "step time", axis: seconds, format: seconds, of: (f) => f.step_time_s ?? {}, ideal: null },
};

function curves(report) {
  const forecasts = list(report.forecasts);
  return list(report.scaling)
    .slice(0, MAX_SERIES)
    .map((series, index) => ({
      name: `${text(series?.family, "?")} · ${text(series?.cluster, "?")}`,
      fill: seriesColor(index),
      points: list(series?.points)
        .map((i) => forecasts[i])
        .filter((f) => isNumber(f?.gpus) && f.gpus > 0),
    }))
    .filter((curve) => curve.points.length > 1);
}

export function scalingCard(report) {
  const all = curves(report);
  if (all.length === 0) return null;
  const state = { metric: "per_gpu" };
  const view = chart(330, () => ({ option: scalingOption(all, METRICS[state.metric]) }), "scaling curve");
  const choices = Object.entries(METRICS).map(([key, metric]) => [key, metric.label]);
  const strong = all.some(({ points }) => new Set(points.map((f) => f.global_batch)).size === 1);
  return card(
    "Scaling",
    {
      tools: [
        segmented(
          choices,
          "per_gpu",
          (m) => {
            state.metric = m;
            view.redraw();
          },
          "quantity",
        ),
      ],
      wide: true,
      hint: `Band: p10 to p90. Dashed: perfect scaling from the smallest size. ${strong ? "The global batch stays the same (strong scaling)." : "The global batch grows with the replicas."}`,
    },
    view.node,
  );
}

function scalingOption(all, metric) {
  const sizes = [...new Set(all.flatMap(({ points }) => points.map((f) => f.gpus)))].sort((a, b) => a - b);
  const series = all.flatMap((curve) => {
    const points = curve.points
      .map((f) => ({ f, v: metric.of(f) }))
      .filter(({ v }) => isNumber(v.p50) && v.p50 > 0);
    return [band(curve, points), line(curve, points), ...ideal(curve, points, metric)].filter(Boolean);
  });
  return {
    grid: {
      left: 8,
      right: 24,
      top: 34 + 16 * Math.floor((all.length - 1) / 2),
      bottom: 26,
      containLabel: true,
    },
    legend: {
      top: 0,
      left: 8,
      data: all.map((c) => c.name),
      textStyle: { color: color("muted"), fontSize: 11, width: 420, overflow: "truncate" },
      itemWidth: 16,
      itemHeight: 8,
    },
    xAxis: {
      type: "log",
      logBase: 2,
      name: "GPUs",
      nameLocation: "middle",
      nameGap: 26,
      min: sizes[0],
      max: sizes.at(-1),
      ...axis({ label: { formatter: count, hideOverlap: true } }),
    },
    yAxis: {
      type: metric === METRICS.rate ? "log" : "value",
      min: metric === METRICS.rate ? undefined : 0,
      ...axis({ label: { formatter: short(metric.axis) } }),
    },
    tooltip: tooltip(({ data }) => data?.forecast && pointTip(data, metric), { trigger: "item" }),
    series,
  };
}

function line(curve, points) {
  return {
    type: "line",
    name: curve.name,
    symbol: "circle",
    symbolSize: 9,
    progressive: 0,
    z: 4,
    lineStyle: { color: curve.fill, width: 2 },
    itemStyle: { color: curve.fill },
    data: points.map(({ f, v }) => ({ value: [f.gpus, v.p50], forecast: f, first: points[0] })),
  };
}

function band(curve, points) {
  const edges = points.filter(({ v }) => isNumber(v.p10) && isNumber(v.p90) && v.p10 > 0);
  if (edges.length < 2) return null;
  const ring = [
    ...edges.map(({ f, v }) => [f.gpus, v.p90]),
    ...edges.map(({ f, v }) => [f.gpus, v.p10]).reverse(),
  ];
  return {
    type: "custom",
    name: curve.name,
    silent: true,
    progressive: 0,
    z: 2,
    itemStyle: { color: curve.fill },
    data: ring,
    renderItem: (params, api) =>
      params.dataIndex > 0
        ? null
        : {
            type: "polygon",
            shape: { points: ring.map((point) => api.coord(point)) },
            style: { fill: curve.fill, opacity: 0.18 },
          },
  };
}

function ideal(curve, points, metric) {
  if (!metric.ideal || points.length < 2) return [];
  const { f, v } = points[0];
  return [
    {
      type: "line",
      name: curve.name,
      silent: true,
      symbol: "none",
      progressive: 0,
      z: 1,
      lineStyle: { color: curve.fill, type: "dashed", width: 1, opacity: 0.7 },
      data: points.map((point) => [point.f.gpus, metric.ideal(v, point.f.gpus / f.gpus)]),
    },
  ];
}

function pointTip({ forecast: f, first }, metric) {
  const v = metric.of(f);
  const efficiency = f.tokens_per_s?.p50 / f.gpus / (first.f.tokens_per_s?.p50 / first.f.gpus);
  return {
    title: text(f.layout),
    rows: [
      ["GPUs", count(f.gpus)],
      ["cluster", text(f.cluster)],
      ["median", metric.format(v.p50)],
      ["p10 – p90", range(v, metric.format)],
      [`efficiency against ${count(first.f.gpus)} GPUs`, percent(efficiency)],
      ["MFU", percent(f.mfu)],
      ["global batch", count(f.global_batch)],
    ],
  };
}

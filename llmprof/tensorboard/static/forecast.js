// What is forecast: step time or throughput with its interval, and where the time goes, one row for each layout.

import { axis, chart, stackedBars, tooltip } from "./charts.js";
import { card, el, segmented, swatch } from "./dom.js";
import {
  count,
  isNumber,
  list,
  numbers,
  percent,
  range,
  seconds,
  short,
  text,
  tokensPerS,
  words,
} from "./format.js";
import { forecastTable } from "./forecast_table.js";
import { color, colorOf } from "./theme.js";

const PARTS = [
  "compute",
  "recompute",
  "tp",
  "cp",
  "ep",
  "dp",
  "pp",
  "bubble",
  "optimizer",
  "host",
  "input",
  "straggler",
];
const MAX_ROWS = 16;
const BASELINES = [
  ["naive_step_time_s", "naive", "diamond"],
  ["second_baseline_step_time_s", "second baseline", "triangle"],
  ["bound_step_time_s", "bound", "rect"],
];

const METRICS = {
  time: {
    label: "step time",
    format: seconds,
    interval: (f) => f.step_time_s ?? {},
    baseline: (f, key) => f[key],
  },
  rate: {
    label: "tokens/s",
    format: tokensPerS,
    interval: (f) => f.tokens_per_s ?? {},
    baseline: (f, key) => (f.tokens_per_s?.p50 * f.step_time_s?.p50) / f[key],
  },
};

/** Axis labels of two lines: the layout, and below it the cluster. */
const rowLabel = () => ({
  rich: {
    layout: { color: color("text"), fontSize: 11, lineHeight: 15 },
    cluster: { color: color("muted"), fontSize: 10, lineHeight: 13 },
  },
});

/** Text for ECharts' rich labels: its markup characters are taken out. */
const bare = (value) => String(value).replace(/[{}|\n]/g, " ");

function twoLines(f) {
  const layout = text(f.layout);
  const short = layout.length > 34 ? `${layout.slice(0, 33)}…` : layout;
  return `{layout|${bare(short)}}\n{cluster|${bare(count(f.gpus))} × ${bare(text(f.cluster, "?").slice(0, 40))}}`;
}

export function forecastSection(report) {
  const forecasts = list(report.forecasts).filter((f) => f && typeof f === "object");
  if (forecasts.length === 0) return [];
  const medians = forecasts.map((f) => f.step_time_s?.p50).filter((v) => isNumber(v) && v > 0);
  const share = Math.max(...medians) > 12 * Math.min(...medians); // short steps beside long ones would be invisible
  const state = { metric: "time", share, rows: forecasts.slice(0, MAX_ROWS) };
  const height = () => 60 + 36 * state.rows.length;
  const intervals = chart(
    height(),
    () => ({ height: height(), option: intervalOption(state.rows, METRICS[state.metric]) }),
    "forecast intervals",
  );
  const parts = chart(
    height(),
    () => ({ height: height(), option: partsOption(state.rows, state.share) }),
    "forecast breakdown",
  );
  const redraw = () => {
    intervals.redraw();
    parts.redraw();
  };
  const table = forecastTable(forecasts, (rows) => {
    state.rows = rows.slice(0, MAX_ROWS);
    redraw();
  });
  const more =
    forecasts.length > MAX_ROWS ? ` The first ${MAX_ROWS} of ${forecasts.length} rows of the table.` : "";
  const present = PARTS.filter((name) => forecasts.some((f) => f.breakdown_s?.[name] > 0));
  return [
    card(
      "Forecasts",
      {
        wide: true,
        hint: "Click a row for its assumptions, baselines, energy and cost; click a head to sort.",
      },
      estimateNote(forecasts),
      table,
    ),
    card(
      "Forecast and baselines",
      {
        tools: [
          segmented(
            [
              ["time", "step time"],
              ["rate", "tokens/s"],
            ],
            "time",
            (m) => {
              state.metric = m;
              redraw();
            },
            "quantity",
          ),
        ],
        hint: `Dot: median; bar: p10 to p90.${more}`,
      },
      intervals.node,
    ),
    card(
      "Where the forecast step goes",
      {
        tools: [
          segmented(
            [
              [false, "time"],
              [true, "share"],
            ],
            share,
            (s) => {
              state.share = s;
              redraw();
            },
            "unit",
          ),
        ],
        hint: "Slowest rank of the slowest stage; communication only where it is exposed.",
      },
      parts.node,
      el(
        "div",
        { class: "legend-line" },
        present.map((name, i) => el("span", {}, swatch(colorOf(name, i)), partName(name))),
      ),
    ),
  ];
}

/** Says first what a reader must know first: that prices come from the spec sheet. */
function estimateNote(forecasts) {
  const assumed = forecasts.filter((f) => f.assumed_fraction > 0.5).length;
  if (assumed === 0) return null;
  const which =
    assumed === forecasts.length ? "These forecasts are" : `${assumed} of ${forecasts.length} forecasts are`;
  return el(
    "p",
    { class: "estimate" },
    el("b", {}, "Spec-sheet estimate. "),
    `${which} mostly assumed, not measured: capture on the device you ask about to narrow the interval.`,
  );
}

function partName(name) {
  return ["tp", "cp", "ep", "dp", "pp"].includes(name) ? `${name} communication` : words(name);
}

function intervalOption(rows, metric) {
  const values = rows
    .flatMap((f) =>
      Object.values(metric.interval(f)).concat(BASELINES.map(([key]) => metric.baseline(f, key))),
    )
    .filter((v) => isNumber(v) && v > 0);
  const wide = Math.max(...values) / Math.min(...values) > 12;
  const dots = BASELINES.map(([key, name, symbol], index) => ({
    type: "scatter",
    name,
    symbol,
    symbolSize: symbol === "rect" ? [3, 16] : 9,
    progressive: 0,
    z: 3,
    itemStyle:
      symbol === "rect"
        ? { color: "#2e9e6b" }
        : { color: color("card"), borderColor: ["#8d9bb0", "#b0703a"][index], borderWidth: 1.5 },
    data: rows.map((f, i) => [metric.baseline(f, key), i]).filter(([v]) => isNumber(v) && v > 0),
  }));
  return {
    grid: { left: 8, right: 30, top: 30, bottom: 4, containLabel: true },
    legend: {
      top: 0,
      left: 8,
      itemWidth: 12,
      itemHeight: 9,
      textStyle: { color: color("muted"), fontSize: 11 },
      selectedMode: false,
      data: [{ name: "forecast", icon: "circle" }, ...BASELINES.map(([, name]) => name)],
    },
    yAxis: {
      type: "category",
      inverse: true,
      data: rows.map((_, i) => i),
      ...axis({
        label: { ...rowLabel(), formatter: (i) => twoLines(rows[i] ?? {}) },
        axis: { splitLine: { show: false } },
      }),
      axisLine: { show: false },
    },
    xAxis: {
      type: wide ? "log" : "value",
      scale: !wide,
      ...axis({
        label: {
          formatter: (v) => short(metric.format)(v).replace(" tokens/s", ""),
          hideOverlap: true,
          showMinLabel: !wide,
          showMaxLabel: !wide,
        },
      }),
      ...(wide ? { min: (v) => v.min * 0.8, max: (v) => v.max * 1.25 } : {}),
    },
    tooltip: tooltip(([first]) => intervalTip(rows[first?.dataIndex ?? 0], metric), {
      trigger: "axis",
      axisPointer: { type: "shadow" },
    }),
    series: [
      {
        type: "custom",
        name: "forecast",
        progressive: 0,
        z: 4,
        itemStyle: { color: "#4c8dff" },
        encode: { x: [1, 2, 3], y: 0 },
        renderItem: drawInterval,
        data: rows.map((f, i) => {
          const v = metric.interval(f);
          return [i, v.p10 ?? v.p50, v.p50, v.p90 ?? v.p50];
        }),
      },
      ...dots,
    ],
  };
}

function drawInterval(_, api) {
  const [low, middle, high] = [1, 2, 3].map((dim) => api.coord([api.value(dim), api.value(0)]));
  if (!low.concat(middle, high).every(Number.isFinite)) return null;
  const fill = api.visual("color");
  const y = middle[1];
  return {
    type: "group",
    children: [
      {
        type: "rect",
        shape: { x: low[0], y: y - 5, width: Math.max(1, high[0] - low[0]), height: 10, r: 3 },
        style: { fill, opacity: 0.32 },
      },
      { type: "circle", shape: { cx: middle[0], cy: y, r: 5 }, style: { fill } },
    ],
  };
}

function intervalTip(f, metric) {
  if (!f) return null;
  const v = metric.interval(f);
  return {
    title: `${text(f.layout)} on ${count(f.gpus)} × ${text(f.cluster)}`,
    rows: [
      ["median", metric.format(v.p50), "#4c8dff"],
      ["p10 – p90", range(v, metric.format)],
      ...BASELINES.map(([key, name]) => [name, metric.format(metric.baseline(f, key))]),
      ["MFU", percent(f.mfu)],
    ],
  };
}

function partsOption(rows, share) {
  const bars = rows.map((f) => {
    const parts = numbers(f.breakdown_s);
    const total = parts.reduce((all, [, v]) => all + v, 0);
    return {
      label: twoLines(f),
      tip: text(f.layout),
      parts: Object.fromEntries(parts.map(([n, v]) => [n, share && total > 0 ? v / total : v])),
    };
  });
  const format = share ? percent : seconds;
  const colored = (name) => colorOf(name, PARTS.indexOf(name));
  const option = stackedBars({
    rows: bars,
    names: PARTS,
    colorFor: colored,
    format,
    label: rowLabel(),
    total: !share,
  });
  if (share) option.xAxis.max = 1;
  return { ...option, grid: { left: 8, right: 30, top: 30, bottom: 4, containLabel: true } };
}

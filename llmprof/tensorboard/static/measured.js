// What was measured: phases of the step, steps over time, memory.

import { axis, chart, stackedBars, tooltip } from "./charts.js";
import { card, el, swatch } from "./dom.js";
import { bytes, count, isNumber, list, micros, numbers, percent, short, words } from "./format.js";
import { color, colorOf } from "./theme.js";

const PHASES = [
  "forward",
  "recompute",
  "backward_input",
  "backward_weight",
  "optimizer",
  "communication",
  "input",
  "host",
  "other",
  "idle",
];
const TOTALS = ["peak", "peak_reserved"];

function ordered(names, known) {
  return [...known.filter((n) => names.includes(n)), ...names.filter((n) => !known.includes(n))];
}

function legend(entries, total, format) {
  return el(
    "div",
    { class: "legend" },
    entries.map(([name, value], index) =>
      el(
        "div",
        { class: "legend-row" },
        swatch(colorOf(name, index)),
        el("span", { class: "legend-name" }, words(name)),
        el("span", { class: "num" }, format(value)),
        el("span", { class: "num muted" }, total > 0 ? percent(value / total) : ""),
      ),
    ),
  );
}

export function phasesCard(report) {
  const entries = numbers(report.show.phases).filter(([, us]) => us > 0);
  if (entries.length === 0) {
    return card(
      "Where the step goes",
      {},
      el("p", { class: "muted" }, "No profiled window was recorded, so phases are not known."),
    );
  }
  const names = ordered(
    entries.map(([name]) => name),
    PHASES,
  );
  const mean = Object.fromEntries(entries);
  const ranks = list(report.ranks).filter((r) => r?.phases);
  const rows = [
    { label: ranks.length > 1 ? "mean" : "", tip: "one step", parts: mean },
    ...(ranks.length > 1
      ? ranks.slice(0, 16).map((r) => ({ label: `rank ${r.rank}`, parts: r.phases }))
      : []),
  ];
  const bars = chart(
    rows.length === 1 ? 74 : 46 + 26 * rows.length,
    () => ({
      option: stackedBars({ rows, names, colorFor: colorOf, format: micros }),
    }),
    "time of each phase in one step",
  );
  const total = entries.reduce((all, [, us]) => all + us, 0);
  return card(
    "Where the step goes",
    { hint: "Exclusive time: the phases add up to the step." },
    bars.node,
    legend(
      names.map((name) => [name, mean[name]]),
      total,
      micros,
    ),
  );
}

export function stepsCard(report) {
  const steps = list(report.steps).filter((s) => isNumber(s?.duration_us) && isNumber(s?.step));
  if (steps.length === 0) return null;
  const usual = steps.filter((s) => s.kind === "train" && !s.instrumented).map((s) => s.duration_us);
  const top = Math.max(...(usual.length ? usual : steps.map((s) => s.duration_us))) * 1.5;
  const groups = new Map();
  for (const step of steps) {
    const name = step.instrumented ? "profiled" : step.kind === "train" ? "training" : String(step.kind);
    groups.set(name, [...(groups.get(name) ?? []), step]);
  }
  const colors = { training: "#4c8dff", profiled: "#f0a33e" };
  const view = chart(
    236,
    () => ({
      option: {
        grid: { left: 8, right: 16, top: 32, bottom: 22, containLabel: true },
        legend: {
          top: 0,
          right: 8,
          icon: "circle",
          itemWidth: 8,
          textStyle: { color: color("muted"), fontSize: 11 },
        },
        xAxis: {
          type: "value",
          name: "step",
          nameLocation: "middle",
          nameGap: 24,
          min: "dataMin",
          max: "dataMax",
          minInterval: 1,
          ...axis({ axis: { splitLine: { show: false } } }),
        },
        yAxis: {
          type: "value",
          min: 0,
          max: top,
          ...axis({ label: { formatter: short(micros), showMaxLabel: false } }),
        },
        tooltip: tooltip(({ data }) => data?.step && stepTip(data.step), { trigger: "item" }),
        series: [...groups].map(([name, members], index) => ({
          type: "scatter",
          name,
          progressive: 0,
          symbolSize: steps.length > 200 ? 4 : 7,
          itemStyle: { color: colors[name] ?? colorOf(name, index + 4) },
          data: members.map((s) => ({
            step: s,
            value: [s.step, Math.min(s.duration_us, top * 0.98)],
            symbol: s.duration_us > top ? "triangle" : "circle",
            symbolSize: s.duration_us > top ? 10 : undefined,
          })),
          markLine:
            name === "training" && isNumber(report.show.step_time_us?.median)
              ? {
                  silent: true,
                  symbol: "none",
                  lineStyle: { color: color("muted"), type: "dashed" },
                  label: {
                    formatter: "median",
                    color: color("muted"),
                    position: "insideEndTop",
                    fontSize: 10,
                  },
                  data: [{ yAxis: report.show.step_time_us.median }],
                }
              : undefined,
        })),
      },
    }),
    "duration of each step",
  );
  return card(
    "Steps",
    {
      hint: "Slowest rank of each step. Only training steps outside the profiled window give the step time; triangles are off the scale.",
    },
    view.node,
  );
}

function stepTip(step) {
  return {
    title: `step ${step.step}`,
    rows: [
      ["time", micros(step.duration_us)],
      ["kind", step.instrumented ? `${step.kind}, profiled` : String(step.kind)],
      ["slowest rank", count(step.rank)],
      ["tokens on this rank", count(step.tokens)],
      ["peak memory", bytes(step.peak_memory_bytes)],
    ],
  };
}

export function memoryCard(report) {
  const entries = numbers(report.show.memory_bytes).filter(([, size]) => size > 0);
  const parts = entries.filter(([name]) => !TOTALS.includes(name));
  if (parts.length === 0) return null;
  const names = parts.map(([name]) => name);
  const rows = [{ label: "", tip: "fullest rank", parts: Object.fromEntries(parts) }];
  const bars = chart(
    74,
    () => ({ option: stackedBars({ rows, names, colorFor: colorOf, format: bytes }) }),
    "memory by category",
  );
  const sum = parts.reduce((all, [, size]) => all + size, 0);
  const peak = report.show.peak_memory_bytes ?? report.show.memory_bytes?.peak;
  return card(
    "Memory",
    { hint: "Bytes of each category on the rank that has most of it." },
    bars.node,
    legend(parts, sum, bytes),
    el(
      "dl",
      { class: "facts" },
      el("dt", {}, "sum of the parts"),
      el("dd", {}, bytes(sum)),
      el("dt", {}, "peak allocated"),
      el("dd", {}, bytes(peak)),
      el("dt", {}, "peak reserved"),
      el("dd", {}, bytes(report.show.memory_bytes?.peak_reserved)),
    ),
  );
}

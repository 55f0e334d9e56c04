// What was measured: phases of the step, steps over time, operators, modules, memory and collectives.

import { axis, chart, stackedBars, tooltip } from "./charts.js";
import { card, el, segmented, swatch } from "./dom.js";
import { bytes, count, flops, isNumber, list, micros, numbers, percent, short, words } from "./format.js";
import { shareBar, sortableTable } from "./table.js";
import { color, colorOf } from "./theme.js";

const PHASES = ["forward", "recompute", "backward_input", "backward_weight", "optimizer", "communication", "input", "host",
  "other", "idle"];
const TOTALS = ["peak", "peak_reserved"];

function ordered(names, known) {
  return [...known.filter((n) => names.includes(n)), ...names.filter((n) => !known.includes(n))];
}

function legend(entries, total, format) {
  return el("div", { class: "legend" }, entries.map(([name, value], index) => el("div", { class: "legend-row" },
    swatch(colorOf(name, index)), el("span", { class: "legend-name" }, words(name)),
    el("span", { class: "num" }, format(value)),
    el("span", { class: "num muted" }, total > 0 ? percent(value / total) : ""))));
}

export function phasesCard(report) {
  const entries = numbers(report.show.phases).filter(([, us]) => us > 0);
  if (entries.length === 0) {
    return card("Where the step goes", {}, el("p", { class: "muted" }, "No profiled window was recorded, so phases are not known."));
  }
  const names = ordered(entries.map(([name]) => name), PHASES);
  const mean = Object.fromEntries(entries);
  const ranks = list(report.ranks).filter((r) => r?.phases);
  const rows = [{ label: ranks.length > 1 ? "mean" : "", tip: "one step", parts: mean },
    ...(ranks.length > 1 ? ranks.slice(0, 16).map((r) => ({ label: `rank ${r.rank}`, parts: r.phases })) : [])];
  const bars = chart(rows.length === 1 ? 74 : 46 + 26 * rows.length, () => ({
    option: stackedBars({ rows, names, colorFor: colorOf, format: micros }),
  }), "time of each phase in one step");
  const total = entries.reduce((all, [, us]) => all + us, 0);
  return card("Where the step goes", { hint: "Exclusive time: the phases add up to the step." }, bars.node,
    legend(names.map((name) => [name, mean[name]]), total, micros));
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
  const view = chart(236, () => ({
    option: {
      grid: { left: 8, right: 16, top: 32, bottom: 22, containLabel: true },
      legend: { top: 0, right: 8, icon: "circle", itemWidth: 8, textStyle: { color: color("muted"), fontSize: 11 } },
      xAxis: { type: "value", name: "step", nameLocation: "middle", nameGap: 24, min: "dataMin", max: "dataMax", minInterval: 1,
        ...axis({ axis: { splitLine: { show: false } } }) },
      yAxis: { type: "value", min: 0, max: top, ...axis({ label: { formatter: short(micros), showMaxLabel: false } }) },
      tooltip: tooltip(({ data }) => data?.step && stepTip(data.step), { trigger: "item" }),
      series: [...groups].map(([name, members], index) => ({
        type: "scatter", name, progressive: 0, symbolSize: steps.length > 200 ? 4 : 7,
        itemStyle: { color: colors[name] ?? colorOf(name, index + 4) },
        data: members.map((s) => ({
          step: s, value: [s.step, Math.min(s.duration_us, top * 0.98)],
          symbol: s.duration_us > top ? "triangle" : "circle", symbolSize: s.duration_us > top ? 10 : undefined,
        })),
        markLine: name === "training" && isNumber(report.show.step_time_us?.median) ? {
          silent: true, symbol: "none", lineStyle: { color: color("muted"), type: "dashed" },
          label: { formatter: "median", color: color("muted"), position: "insideEndTop", fontSize: 10 },
          data: [{ yAxis: report.show.step_time_us.median }],
        } : undefined,
      })),
    },
  }), "duration of each step");
  return card("Steps", { hint: "Slowest rank of each step. Only training steps outside the profiled window give the step time; triangles are off the scale." },
    view.node);
}

function stepTip(step) {
  return {
    title: `step ${step.step}`,
    rows: [["time", micros(step.duration_us)], ["kind", step.instrumented ? `${step.kind}, profiled` : String(step.kind)],
      ["slowest rank", count(step.rank)], ["tokens on this rank", count(step.tokens)], ["peak memory", bytes(step.peak_memory_bytes)]],
  };
}

function groupColumns(label, longest) {
  return [
    { label, grow: true, value: (r) => r.key, cell: (r) => el("code", {}, String(r.key)), tip: (r) => String(r.key) },
    { label: "Share of step", value: (r) => r.share, numeric: true, cell: (r) => shareBar(r.share / longest, colorOf(list(r.phases)[0])) },
    { label: "Time", numeric: true, value: (r) => r.exclusive_us, cell: (r) => micros(r.exclusive_us), title: "exclusive time per step" },
    { label: "Calls", numeric: true, value: (r) => r.count, cell: (r) => count(r.count), title: "calls per step" },
    { label: "FLOPs", numeric: true, value: (r) => r.flops, cell: (r) => flops(r.flops), title: "per step" },
  ].map((column) => (column.label === "Share of step" ? { ...column, cell: (r) => wideBar(r, longest) } : column));
}

/** The bar is relative to the longest row, the number is the share of the step. */
function wideBar(row, longest) {
  const bar = shareBar(row.share, colorOf(list(row.phases)[0]));
  bar.title = list(row.phases).map(words).join(", ");
  const width = longest > 0 && isNumber(row.share) ? Math.max(0, row.share / longest) * 100 : 0;
  bar.querySelector(".share-fill").style.setProperty("width", `${Math.min(100, width)}%`);
  return bar;
}

const CALLS = [
  { label: "Operator", grow: true, value: (r) => r.op, cell: (r) => el("code", {}, String(r.op)), tip: (r) => `${r.op} in ${r.module || "(root)"}` },
  { label: "Shapes", grow: true, value: (r) => r.shapes, cell: (r) => el("code", {}, String(r.shapes ?? "")), tip: (r) => `${r.shapes} ${r.dtype}` },
  { label: "Phase", value: (r) => r.phase, cell: (r) => words(r.phase) },
  { label: "Time", numeric: true, value: (r) => r.exclusive_us, cell: (r) => micros(r.exclusive_us), title: "exclusive time per step" },
  { label: "Calls", numeric: true, value: (r) => r.count, cell: (r) => count(r.count), title: "calls per step" },
];

function groupedCard(title, choices, report, hint) {
  const holder = el("div");
  const show = (key) => {
    const rows = list(report.show[key]).filter((r) => r && typeof r === "object");
    const longest = Math.max(0, ...rows.map((r) => (isNumber(r.share) ? r.share : 0)));
    const columns = key === "operators" ? CALLS : groupColumns(choices.find(([k]) => k === key)[2], longest);
    holder.replaceChildren(rows.length === 0 ? el("p", { class: "muted" }, "No operators were recorded.")
      : sortableTable(columns, rows, { sort: key === "operators" ? 3 : 2, limit: 10 }));
  };
  show(choices[0][0]);
  return card(title, { tools: [segmented(choices, choices[0][0], show, title)], hint }, holder);
}

export function operatorsCard(report) {
  return groupedCard("Operators", [["by_operator", "operator", "Operator"], ["by_family", "family", "Family"], ["operators", "shape", "Operator"]],
    report, "Bars have the colour of the phase in which most of the time was spent.");
}

export function modulesCard(report) {
  return groupedCard("Modules", [["by_layer", "layers folded", "Module"], ["by_module", "each", "Module"]], report,
    "Innermost module that ran the operators, forward and backward.");
}

export function memoryCard(report) {
  const entries = numbers(report.show.memory_bytes).filter(([, size]) => size > 0);
  const parts = entries.filter(([name]) => !TOTALS.includes(name));
  if (parts.length === 0) return null;
  const names = parts.map(([name]) => name);
  const rows = [{ label: "", tip: "fullest rank", parts: Object.fromEntries(parts) }];
  const bars = chart(74, () => ({ option: stackedBars({ rows, names, colorFor: colorOf, format: bytes }) }), "memory by category");
  const sum = parts.reduce((all, [, size]) => all + size, 0);
  const peak = report.show.peak_memory_bytes ?? report.show.memory_bytes?.peak;
  return card("Memory", { hint: "Bytes of each category on the rank that has most of it." }, bars.node, legend(parts, sum, bytes),
    el("dl", { class: "facts" }, el("dt", {}, "sum of the parts"), el("dd", {}, bytes(sum)), el("dt", {}, "peak allocated"),
      el("dd", {}, bytes(peak)), el("dt", {}, "peak reserved"), el("dd", {}, bytes(report.show.memory_bytes?.peak_reserved))));
}

export function collectivesCard(report) {
  const rows = list(report.show.collectives).filter((r) => r && typeof r === "object");
  if (rows.length === 0) return null;
  return card("Collectives", { hint: "Exposed time is time in which nothing else ran." }, sortableTable([
    { label: "Kind", grow: true, value: (r) => r.kind, cell: (r) => words(r.kind) },
    { label: "Axis", value: (r) => r.axis, cell: (r) => String(r.axis || "–") },
    { label: "Group", numeric: true, value: (r) => r.group_size, cell: (r) => (r.group_size ? count(r.group_size) : "–"), title: "ranks" },
    { label: "Message", numeric: true, value: (r) => r.size_bytes, cell: (r) => bytes(r.size_bytes) },
    { label: "Calls", numeric: true, value: (r) => r.count, cell: (r) => count(r.count), title: "per step" },
    { label: "One call", numeric: true, value: (r) => r.time_us, cell: (r) => micros(r.time_us) },
    { label: "Exposed", numeric: true, value: (r) => r.exposed_us, cell: (r) => micros(r.exposed_us), title: "per step" },
  ], rows, { sort: 6, limit: 8 }));
}

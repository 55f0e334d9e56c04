// Everything that stands beside one forecast: baselines, bound, breakdown, evidence, assumptions, the whole run.

import { el, swatch } from "./dom.js";
import {
  bytes,
  count,
  digits,
  isNumber,
  list,
  numbers,
  percent,
  plain,
  range,
  seconds,
  text,
  tokensPerS,
  words,
} from "./format.js";
import { colorOf } from "./theme.js";

/** What was measured, interpolated, assumed: key, name and colour. */
export const SOURCES = [
  ["measured_fraction", "measured", "#2e9e6b"],
  ["interpolated_fraction", "interpolated", "#4c8dff"],
  ["assumed_fraction", "assumed", "#f0a33e"],
];

function facts(pairs) {
  return el(
    "dl",
    { class: "facts" },
    pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}

/** Steps, days and money of the whole run, when its number of tokens was given. */
function wholeRun(run) {
  if (!run || typeof run !== "object") return [];
  const total = run.cost;
  return [
    el("h3", {}, `The whole run: ${plain(run.tokens).replace("G", "B")} tokens`),
    facts([
      ["steps", count(isNumber(run.steps) ? Math.round(run.steps) : null)],
      ["days (median)", digits(run.days?.p50)],
      ["days (p10 – p90)", range(run.days, digits)],
      ["cost", isNumber(total?.total) ? `${plain(total.total)} ${text(total.currency, "")}` : "not known"],
    ]),
  ];
}

function answers(f) {
  const cost = isNumber(f.cost?.per_step)
    ? `${digits(f.cost.per_step)} ${text(f.cost.currency, "")} per step`
    : "not known";
  const energy = isNumber(f.energy_j_per_step?.p50)
    ? `${plain(f.energy_j_per_step.p50)}${f.energy_j_per_step.p50 < 1000 ? " " : ""}J`
    : "not known";
  return facts([
    ["naive forecast", seconds(f.naive_step_time_s)],
    ["second baseline", seconds(f.second_baseline_step_time_s)],
    ["bound (nothing is faster)", seconds(f.bound_step_time_s)],
    ["tokens/s", tokensPerS(f.tokens_per_s?.p50)],
    ["usable memory of a GPU", bytes(f.usable_memory_bytes)],
    ["probability of OOM", percent(f.oom_probability)],
    ["cost", cost],
    ["energy per step", energy],
  ]);
}

function breakdown(f) {
  const parts = numbers(f.breakdown_s).filter(([, v]) => v > 0);
  const total = parts.reduce((all, [, v]) => all + v, 0);
  const rows = parts.map(([name, value], i) =>
    el(
      "div",
      { class: "legend-row" },
      swatch(colorOf(name, i)),
      el("span", { class: "legend-name" }, words(name)),
      el("span", { class: "num" }, seconds(value)),
      el("span", { class: "num muted" }, percent(value / total)),
    ),
  );
  return el("div", { class: "legend" }, rows);
}

function assumptions(f) {
  const lines = list(f.assumptions).filter((line) => typeof line === "string");
  if (lines.length === 0) return el("p", { class: "muted" }, "none stated");
  return el(
    "ul",
    {},
    lines.map((line) => el("li", {}, line)),
  );
}

/** What a row of the table opens to. */
export function detail(f) {
  const origins = facts(SOURCES.map(([key, name]) => [name, percent(f[key])]));
  return el(
    "div",
    { class: "detail-grid" },
    el("div", {}, el("h3", {}, "Beside the answer"), answers(f), ...wholeRun(f.run)),
    el(
      "div",
      {},
      el("h3", {}, "Breakdown of the median"),
      breakdown(f),
      el("h3", {}, "Where the prices come from"),
      origins,
    ),
    el("div", {}, el("h3", {}, "Assumptions"), assumptions(f)),
  );
}

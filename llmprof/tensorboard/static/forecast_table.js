// The forecasts as a table; each row opens to its detail.

import { el } from "./dom.js";
import { detail, SOURCES } from "./forecast_detail.js";
import { bytes, count, digits, isNumber, percent, plain, range, seconds, text } from "./format.js";
import { sortableTable } from "./table.js";

const VERDICTS = { fits: "good", tight: "warn", oom: "bad" };
function two(main, below) {
  return el("div", { class: "two" }, el("span", {}, main), el("small", { class: "muted" }, below));
}

function verdict(f) {
  const name = text(f.verdict);
  const chance = isNumber(f.oom_probability)
    ? `out of memory with a probability of ${percent(f.oom_probability)}`
    : "";
  return el(
    "span",
    { class: `pill ${Object.hasOwn(VERDICTS, name) ? VERDICTS[name] : ""}`, title: chance },
    name === "oom" ? "OOM" : name,
  );
}

function evidence(f) {
  const tip = SOURCES.map(([key, name]) => `${name} ${percent(f[key])}`).join(", ");
  return el(
    "div",
    { class: "evidence", title: tip },
    SOURCES.map(([key, , fill]) =>
      el("span", {
        style: {
          width: `${Math.max(0, Math.min(1, isNumber(f[key]) ? f[key] : 0)) * 100}%`,
          "background-color": fill,
        },
      }),
    ),
  );
}

function money(cost) {
  if (!isNumber(cost?.per_1e9_tokens)) return "not known";
  return `${digits(cost.per_1e9_tokens)} ${text(cost.currency, "")}`;
}

/** How far the median is from the naive forecast: "×1.31". */
function ratio(f) {
  const value = f.step_time_s?.p50 / f.naive_step_time_s;
  return isNumber(value) ? value : null;
}

const COLUMNS = [
  {
    label: "Layout",
    grow: true,
    value: (f) => f.layout,
    tip: (f) => text(f.layout),
    cell: (f) => two(el("code", {}, text(f.layout)), layoutNote(f)),
  },
  { label: "Cluster", value: (f) => f.cluster, cell: (f) => text(f.cluster) },
  { label: "GPUs", numeric: true, value: (f) => f.gpus, cell: (f) => count(f.gpus) },
  {
    label: "Step time",
    numeric: true,
    value: (f) => f.step_time_s?.p50,
    cell: (f) => two(seconds(f.step_time_s?.p50), range(f.step_time_s, seconds)),
    title: "median, and p10 to p90",
  },
  {
    label: "Tokens/s",
    numeric: true,
    value: (f) => f.tokens_per_s?.p50,
    cell: (f) => two(plain(f.tokens_per_s?.p50), range(f.tokens_per_s, plain)),
    title: "median, and p10 to p90",
  },
  { label: "MFU", numeric: true, value: (f) => f.mfu, cell: (f) => percent(f.mfu) },
  {
    label: "vs naive",
    numeric: true,
    value: ratio,
    cell: (f) => (ratio(f) === null ? "not known" : `× ${digits(ratio(f))}`),
    title: "step time over the naive forecast",
  },
  {
    label: "Peak memory",
    numeric: true,
    value: (f) => f.peak_memory_bytes?.p50,
    cell: (f) => two(bytes(f.peak_memory_bytes?.p50), `p90 ${bytes(f.peak_memory_bytes?.p90)}${ofUsable(f)}`),
    title: "median and p90 of the fullest rank; the share is of the usable memory of a GPU",
  },
  { label: "Fits", value: (f) => f.oom_probability, cell: verdict },
  {
    label: "Cost / 1e9 tokens",
    numeric: true,
    value: (f) => f.cost?.per_1e9_tokens,
    cell: (f) => money(f.cost),
  },
  {
    label: "Evidence",
    value: (f) => f.measured_fraction,
    numeric: true,
    cell: evidence,
    title: "share of the time that was measured, interpolated, assumed",
  },
];

function ofUsable(f) {
  const share = f.peak_memory_bytes?.p90 / f.usable_memory_bytes;
  return isNumber(share) && share > 0 ? `, ${percent(share)}` : "";
}

function layoutNote(f) {
  const batch = isNumber(f.global_batch) ? `global batch ${count(f.global_batch)}` : "global batch not known";
  return isNumber(f.assumed_fraction) && f.assumed_fraction > 0.5 ? `${batch} · spec-sheet estimate` : batch;
}

export function forecastTable(forecasts, onorder) {
  return sortableTable(COLUMNS, forecasts, { detail, onorder, limit: 16, noun: "forecasts" });
}

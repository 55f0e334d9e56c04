// The head of the page: what was run, on what, the five numbers to know, and what to be careful about.

import { el } from "./dom.js";
import {
  bytes,
  count,
  date,
  isNumber,
  list,
  micros,
  NOT_KNOWN,
  numbers,
  percent,
  plain,
  seconds,
  text,
  words,
} from "./format.js";

function chip(label, value, kind = "") {
  return (
    value &&
    el("span", { class: `chip ${kind}`, title: `${label}: ${value}` }, el("b", {}, label), ` ${value}`)
  );
}

function deviceText(run) {
  const devices = list(run.devices).map(
    (d) => `${isNumber(d?.ranks) ? `${count(d.ranks)} × ` : ""}${text(d?.name, text(d?.device))}`,
  );
  return devices.join(" + ");
}

function kpi(label, value, detail, tip = "") {
  return el(
    "div",
    { class: value === NOT_KNOWN ? "kpi unknown" : "kpi", title: tip },
    el("div", { class: "kpi-label" }, label),
    el("div", { class: "kpi-value" }, value),
    el("div", { class: "kpi-detail" }, detail),
  );
}

export function header(report, name) {
  const run = report.run ?? {};
  const ranks = isNumber(run.world_size) ? `${count(run.world_size)}` : "";
  const shape = isNumber(run.batch) && isNumber(run.seq) ? `${count(run.batch)} × ${count(run.seq)}` : "";
  return el(
    "div",
    { class: "chips" },
    run.status === "partial" && chip("partial run", "it ended before it was closed", "warn"),
    run.kind === "predicted" && chip("predicted", "nothing here was measured", "warn"),
    chip("model", text(run.model, "")),
    chip("device", deviceText(run)),
    chip("ranks", ranks),
    chip("layout", text(run.layout, "")),
    chip("precision", text(run.precision, "")),
    chip("microbatch", shape && `${shape} tokens`),
    chip("captured", run.created ? date(run.created) : ""),
    chip("run", text(run.name, "") === name ? "" : text(run.name, "")),
  );
}

export function kpis(report) {
  const { show, run } = report;
  if (!show) return null;
  const time = show.step_time_us ?? {};
  const spread = isNumber(time.iqr) ? `IQR ${micros(time.iqr)}, ` : "";
  const device = list(run?.devices)[0] ?? {};
  const perRank =
    isNumber(show.tokens_per_s) && isNumber(run?.world_size) && run.world_size > 1
      ? `${plain(show.tokens_per_s / run.world_size)} per rank`
      : "over all ranks";
  const share =
    isNumber(show.peak_memory_bytes) && device.memory_bytes > 0
      ? `${percent(show.peak_memory_bytes / device.memory_bytes)} of ${bytes(device.memory_bytes)}`
      : "of the fullest rank";
  const [phase, longest] = numbers(show.phases).sort((a, b) => b[1] - a[1])[0] ?? [];
  return el(
    "div",
    { class: "kpis" },
    kpi(
      "Step time",
      micros(time.median),
      `${spread}${isNumber(time.n) ? `${count(time.n)} steps` : ""}`,
      "median over steps of the slowest rank",
    ),
    kpi(
      "Throughput",
      isNumber(show.tokens_per_s) ? `${plain(show.tokens_per_s)} tokens/s` : NOT_KNOWN,
      perRank,
    ),
    kpi(
      "MFU",
      percent(show.mfu),
      `of the dense ${text(run?.precision, "")} peak`,
      "model FLOPs, no recompute, over dense peak FLOP/s",
    ),
    kpi("Peak memory", bytes(show.peak_memory_bytes), share),
    kpi(
      "Longest phase",
      phase ? words(phase) : NOT_KNOWN,
      phase ? `${percent(longest / time.median)} of the step` : "",
    ),
    kpi(
      "Attributed",
      percent(show.attributed_fraction),
      isNumber(show.root_fraction) ? `${percent(show.root_fraction)} at the root` : "",
      "share of operator time whose owner is the innermost module that ran it",
    ),
  );
}

/** For a run without measurements: the five numbers of its first forecast. */
export function forecastKpis(report) {
  const forecast = list(report.forecasts)[0];
  if (!forecast || report.show) return null;
  const step = forecast.step_time_s ?? {};
  return el(
    "div",
    { class: "kpis" },
    kpi("Step time", seconds(step.p50), "median forecast"),
    kpi("MFU", percent(forecast.mfu), "forecast"),
    kpi("GPUs", count(forecast.gpus), text(forecast.cluster, "")),
    kpi("Peak memory", bytes(forecast.peak_memory_bytes?.p50), text(forecast.verdict, "")),
  );
}

export function notes(title, entries, kind) {
  const texts = list(entries).filter((entry) => typeof entry === "string");
  if (texts.length === 0) return null;
  return el(
    "details",
    { class: `notes ${kind}`, open: kind === "warn" && texts.length <= 3 },
    el("summary", {}, `${texts.length} ${title}${texts.length === 1 ? "" : "s"}`),
    el(
      "ul",
      {},
      texts.map((entry) => el("li", {}, entry)),
    ),
  );
}

// Turns numbers into short texts with units. What is null, missing or no number is "not known", never zero.

export const NOT_KNOWN = "not known";

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Three significant digits, without an exponent for everyday sizes. */
export function digits(value, significant = 3) {
  if (!isNumber(value)) return NOT_KNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(significant - 1);
  const decimals = Math.max(0, significant - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(decimals, 6));
}

function scaled(value, steps) {
  if (!isNumber(value)) return NOT_KNOWN;
  const size = Math.abs(value);
  const [factor, unit] = steps.find(([limit]) => size >= limit) ?? steps[steps.length - 1];
  return `${digits(value / factor)} ${unit}`.trimEnd();
}

const TIME = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];
const SIZE = [
  [1e15, "PB"],
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
  [1, "B"],
];
const PLAIN = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
];

export function seconds(value) {
  if (value === 0) return "0 s";
  return scaled(value, isNumber(value) && Math.abs(value) < 120 ? TIME.slice(3) : TIME);
}
export const micros = (value) => seconds(isNumber(value) ? value / 1e6 : null);
export const bytes = (value) => scaled(value, SIZE);
export const plain = (value) => scaled(value, PLAIN);
export const flops = (value) => (isNumber(value) && value > 0 ? `${plain(value)}FLOP` : "–");
export const tokensPerS = (value) => (isNumber(value) ? `${plain(value)} tokens/s` : NOT_KNOWN);

export function percent(value) {
  if (!isNumber(value)) return NOT_KNOWN;
  const points = value * 100;
  if (points > 0 && points < 0.01) return "< 0.01 %";
  return `${Math.abs(points) >= 10 ? points.toFixed(1) : digits(points, 2)} %`;
}

export function count(value) {
  if (!isNumber(value)) return NOT_KNOWN;
  return Number.isInteger(value) ? value.toLocaleString("en") : digits(value);
}

/** A format for axis labels: "100 ms" instead of "100.0 ms". */
export const short = (format) => (value) =>
  format(value)
    .replace(/(\.\d*?)0+(?= |$)/, "$1")
    .replace(/\.(?= |$)/, "");

/** "411 ms – 463 ms" from {p10, p90}. */
export function range(interval, format) {
  if (!isNumber(interval?.p10) || !isNumber(interval?.p90)) return NOT_KNOWN;
  return `${format(interval.p10)} – ${format(interval.p90)}`;
}

export function text(value, otherwise = NOT_KNOWN) {
  return typeof value === "string" && value !== "" ? value : otherwise;
}

/** Words of an identifier: "backward_weight" -> "backward weight". */
export const words = (name) => String(name).replaceAll("_", " ");

export const list = (value) => (Array.isArray(value) ? value : []);

/** Entries of an object that are finite numbers. */
export function numbers(object) {
  return Object.entries(object && typeof object === "object" ? object : {}).filter(([, v]) => isNumber(v));
}

export function date(value) {
  const parsed = new Date(isNumber(value) ? value * 1000 : value);
  return Number.isNaN(parsed.getTime())
    ? NOT_KNOWN
    : parsed.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

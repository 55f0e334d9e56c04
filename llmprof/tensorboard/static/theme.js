// Follows TensorBoard's light or dark mode and gives every phase, memory category and series its fixed colour.

const media = window.matchMedia("(prefers-color-scheme: dark)");

function host() {
  try {
    return window.parent !== window ? window.parent.document.body : null;
  } catch {
    return null; // framed by another origin: only the browser's own preference is known
  }
}

export function isDark() {
  const body = host();
  return body ? body.classList.contains("dark-mode") : media.matches;
}

/** Calls back now and whenever the mode changes. */
export function followTheme(onchange) {
  let last = null;
  const apply = () => {
    const dark = isDark();
    if (dark === last) return;
    last = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    onchange(dark);
  };
  const body = host();
  if (body) new MutationObserver(apply).observe(body, { attributes: true, attributeFilter: ["class"] });
  media.addEventListener("change", apply);
  apply();
}

/** A colour of style.css. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const FIXED = {
  forward: "#4c8dff",
  recompute: "#9dc1ff",
  backward_input: "#6b5bd6",
  backward_weight: "#a596f0",
  optimizer: "#f0a33e",
  communication: "#e0605c",
  input: "#35b0a2",
  host: "#8d9bb0",
  idle: "#c5ccd6",
  other: "#b79f86",
  compute: "#4c8dff",
  tp: "#e0605c",
  cp: "#f08c5a",
  ep: "#d973ac",
  dp: "#bf4a7a",
  pp: "#9a5bb5",
  bubble: "#c5ccd6",
  straggler: "#8a6f63",
  parameters: "#4c8dff",
  gradients: "#a596f0",
  activations: "#35b0a2",
  buffers: "#9dc1ff",
  temporary: "#e9c46a",
  framework: "#8d9bb0",
};
const SERIES = ["#4c8dff", "#f0a33e", "#35b0a2", "#e0605c", "#9a5bb5", "#8a6f63", "#d973ac", "#6b8e23"];

export function colorOf(name, index = 0) {
  return Object.hasOwn(FIXED, name) ? FIXED[name] : seriesColor(index);
}

export const seriesColor = (index) => SERIES[index % SERIES.length];

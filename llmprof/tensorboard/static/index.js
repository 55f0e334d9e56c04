// The LLMPROF tab: chooses a run, asks for its report and lays out its parts.

import { fetchReport, fetchRuns } from "./api.js";
import { drawAll } from "./charts.js";
import { el, guarded, message } from "./dom.js";
import { forecastSection } from "./forecast.js";
import { date, list } from "./format.js";
import { memoryCard, phasesCard, stepsCard } from "./measured.js";
import { collectivesCard, modulesCard, operatorsCard } from "./operators.js";
import { forecastKpis, header, kpis, notes } from "./overview.js";
import { scalingCard } from "./scaling.js";
import { followTheme } from "./theme.js";

const REMEMBERED = "llmprof.run";
const POLL_MS = 20_000;

const state = { runs: [], selected: null, updated: null, request: 0 };
const picker = el("select", { "aria-label": "run", onchange: () => select(picker.value) });
const nav = el("nav", { "aria-label": "parts" });
const reload = el("button", { type: "button", class: "reload", onclick: () => refresh(true) }, "Reload");
const page = el("main");

export async function render() {
  const styles = ["style.css", "parts.css"].map((name) =>
    el("link", { rel: "stylesheet", href: new URL(name, import.meta.url).href }),
  );
  const ready = styles.map((style) => new Promise((resolve) => (style.onload = style.onerror = resolve)));
  document.head.append(...styles);
  document.documentElement.lang = "en";
  await Promise.all(ready);
  document.body.replaceChildren(
    el("div", { class: "bar" }, el("span", { class: "brand" }, "llmprof"), picker, nav, reload),
    page,
  );
  followTheme(() => drawAll());
  await refresh(true);
  setInterval(() => {
    if (!document.hidden) refresh(false);
  }, POLL_MS);
}

async function refresh(force) {
  let answer;
  try {
    answer = await fetchRuns();
  } catch (error) {
    if (force) show(message("The runs cannot be listed.", error.message, error.hint));
    return;
  }
  state.runs = list(answer?.runs).filter((run) => typeof run?.name === "string");
  drawPicker();
  if (state.runs.length === 0) {
    state.selected = state.updated = null;
    show(emptyState(String(answer?.logdir ?? "")));
    return;
  }
  const names = state.runs.map((run) => run.name);
  const wanted = [state.selected, remembered(), names[0]].find((name) => names.includes(name));
  const { updated } = state.runs.find((run) => run.name === wanted);
  if (force || wanted !== state.selected || updated !== state.updated) await select(wanted);
}

function remembered() {
  try {
    return sessionStorage.getItem(REMEMBERED);
  } catch {
    return null;
  }
}

function drawPicker() {
  picker.hidden = reload.hidden = state.runs.length === 0;
  picker.replaceChildren(
    ...state.runs.map((run) =>
      el(
        "option",
        { value: run.name, title: date(run.updated) },
        run.name === "." ? "(this directory)" : run.name,
      ),
    ),
  );
  if (state.selected !== null) picker.value = state.selected;
}

async function select(name) {
  const request = ++state.request;
  Object.assign(state, { selected: name, updated: state.runs.find((run) => run.name === name)?.updated });
  picker.value = name;
  try {
    sessionStorage.setItem(REMEMBERED, name);
  } catch {
    // storage may be forbidden; the choice then lasts as long as the page
  }
  page.setAttribute("aria-busy", "true");
  let made;
  try {
    made = reportView(await fetchReport(name), name);
  } catch (error) {
    made = message("This run cannot be shown.", error.message, error.hint ?? "");
  }
  if (request === state.request) show(made);
}

function show(...nodes) {
  page.removeAttribute("aria-busy");
  const parts = nodes.flat().filter(Boolean);
  page.replaceChildren(...parts);
  nav.replaceChildren(
    ...[...page.querySelectorAll("h1[id]")].map((heading) =>
      el(
        "button",
        {
          type: "button",
          onclick: () => heading.scrollIntoView({ behavior: "smooth", block: "start" }),
        },
        heading.textContent,
      ),
    ),
  );
  drawAll();
}

function reportView(report, name) {
  const measured = report.show && typeof report.show === "object";
  const cards = (makers) =>
    makers.flatMap(([title, make]) => guarded(title, () => make(report))).filter(Boolean);
  const upper = measured
    ? cards([
        ["Where the step goes", phasesCard],
        ["Steps", stepsCard],
        ["Operators", operatorsCard],
        ["Modules", modulesCard],
        ["Memory", memoryCard],
        ["Collectives", collectivesCard],
      ])
    : [];
  const lower = cards([
    ["Forecasts", forecastSection],
    ["Scaling", scalingCard],
  ]);
  return [
    guarded("Run", () => header(report, name)),
    guarded("Numbers", () => kpis(report) ?? forecastKpis(report)),
    report.problem &&
      message(
        "Nothing was measured.",
        String(report.problem.message ?? ""),
        String(report.problem.hint ?? ""),
      ),
    upper.length + lower.length === 0 &&
      !report.problem &&
      message("This report holds no measurement and no forecast."),
    guarded("Warnings", () => notes("warning", report.show?.warnings, "warn")),
    guarded("Assumptions", () => notes("assumption", report.run?.assumptions, "")),
    upper.length > 0 && el("h1", { id: "measured" }, "Measured"),
    upper.length > 0 && el("div", { class: "grid even" }, upper),
    lower.length > 0 && el("h1", { id: "forecast" }, "Forecast"),
    lower.length > 0 && el("div", { class: "grid" }, lower),
    lower.length === 0 && forecastHint(name),
  ];
}

function forecastHint(name) {
  return el(
    "p",
    { class: "muted foot" },
    "No forecasts were written for this run yet: ",
    el("code", {}, `llmprof forecast RUN --cluster 8xH100-SXM --gpus 64 --layout dp=8,tp=8 --tb LOGDIR`),
    ` adds them to ${name === "." ? "this directory" : name}.`,
  );
}

function emptyState(logdir) {
  const place = logdir || "LOGDIR";
  return el(
    "div",
    { class: "empty" },
    el("h1", {}, "No run was found yet"),
    el(
      "p",
      {},
      "This tab shows where a training step spends its time, and what the same model would do on other machines. It looks in ",
      el("code", {}, place),
      ".",
    ),
    el(
      "ol",
      {},
      el(
        "li",
        {},
        "Capture a short run: ",
        el("pre", {}, `import llmprof\n\n@llmprof.profile(logdir="${place}/first")\ndef train():\n    ...`),
        "or, without changing the script: ",
        el("pre", {}, `llmprof run -o ${place}/first -- train.py`),
      ),
      el(
        "li",
        {},
        "Add forecasts: ",
        el(
          "pre",
          {},
          `llmprof forecast ${place}/first --cluster 8xH100-SXM --gpus 64 --layout dp=8,tp=8 --tb ${place}`,
        ),
      ),
      el("li", {}, "Press Reload here; the page also looks again by itself."),
    ),
    el("button", { type: "button", class: "reload", onclick: () => refresh(true) }, "Reload"),
  );
}

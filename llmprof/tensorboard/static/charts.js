// Mounts ECharts on cards: one theme, tooltips made of DOM nodes, redrawn when the size or the mode changes.

import * as echarts from "./vendor/echarts.esm.min.js";
import { el, message, swatch } from "./dom.js";
import { short } from "./format.js";
import { color } from "./theme.js";

const live = new Set();
const resizer = new ResizeObserver((entries) => {
  for (const { target } of entries) target.llmprofChart?.resize();
});

/** A chart of a fixed height; `option()` is asked again when the mode changes. Call `redraw` for other data. */
export function chart(height, option, label) {
  const node = el("div", {
    class: "chart",
    role: "img",
    "aria-label": label,
    style: { height: `${height}px` },
  });
  const entry = { node, redraw: () => redraw(node, option) };
  live.add(entry);
  return entry;
}

function redraw(node, option) {
  if (!node.isConnected) return;
  try {
    const next = option();
    if (!node.llmprofChart) {
      node.replaceChildren();
      node.llmprofChart = echarts.init(node, null, { renderer: "svg" });
    }
    if (next.height) node.style.setProperty("height", `${next.height}px`);
    node.llmprofChart.resize();
    node.llmprofChart.setOption({ ...base(), ...next.option }, { notMerge: true });
  } catch (error) {
    node.llmprofChart?.dispose();
    node.llmprofChart = null;
    node.replaceChildren(
      message("This chart cannot be drawn.", String(error?.message ?? error).slice(0, 300)),
    );
  }
}

/** Draws every chart that is on the page and forgets those that are not. */
export function drawAll() {
  for (const entry of live) {
    if (entry.node.isConnected) {
      entry.redraw();
      resizer.observe(entry.node);
    } else {
      resizer.unobserve(entry.node);
      entry.node.llmprofChart?.dispose();
      live.delete(entry);
    }
  }
}

function base() {
  return {
    animation: false,
    textStyle: { fontFamily: "inherit", color: color("text") },
    grid: { left: 8, right: 30, top: 12, bottom: 8, containLabel: true },
  };
}

export function axis(extra = {}) {
  return {
    axisLine: { lineStyle: { color: color("line") } },
    axisTick: { show: false },
    axisLabel: { color: color("muted"), fontSize: 11, ...extra.label },
    splitLine: { lineStyle: { color: color("grid") } },
    nameTextStyle: { color: color("muted"), fontSize: 11 },
    ...extra.axis,
  };
}

/** A tooltip whose content is DOM nodes: rows is [[text, text, colour], …]. */
export function tooltip(content, extra = {}) {
  return {
    confine: true,
    backgroundColor: color("card"),
    borderColor: color("line"),
    textStyle: { color: color("text"), fontSize: 12 },
    formatter: (params) => {
      const made = content(params);
      return made ? tooltipNode(made) : "";
    },
    ...extra,
  };
}

function tooltipNode({ title, rows }) {
  return el(
    "div",
    { class: "tip" },
    el("strong", {}, title),
    el(
      "table",
      {},
      rows.map(([name, value, dot]) =>
        el("tr", {}, el("td", {}, dot && swatch(dot), name), el("td", { class: "num" }, value)),
      ),
    ),
  );
}

/** Horizontal stacked bars: `rows` are {label, parts: {name: value}}; names give the order of the stack. */
export function stackedBars({
  rows,
  names,
  colorFor,
  format,
  labelWidth = 0,
  axisLabel,
  label,
  total = true,
}) {
  const series = names.map((name, index) => ({
    type: "bar",
    name,
    stack: "all",
    barMaxWidth: 22,
    progressive: 0,
    itemStyle: { color: colorFor(name, index), borderColor: color("card"), borderWidth: 0.5 },
    data: rows.map((row) => row.parts[name] ?? 0),
  }));
  return {
    yAxis: {
      type: "category",
      inverse: true,
      data: rows.map((_, i) => i),
      ...axis({
        label: {
          width: labelWidth || undefined,
          overflow: "truncate",
          formatter: (i) => rows[i]?.label ?? "",
          ...label,
        },
      }),
      axisLine: { show: false },
      show: rows.some((row) => row.label),
    },
    xAxis: {
      type: "value",
      ...axis({ label: { formatter: short(axisLabel ?? format), hideOverlap: true } }),
    },
    tooltip: tooltip(([first]) => stackTip(rows[first.dataIndex], names, colorFor, format, total), {
      trigger: "axis",
      axisPointer: { type: "shadow" },
    }),
    series,
  };
}

function stackTip(row, names, colorFor, format, total) {
  const present = names
    .map((name, index) => [name, row.parts[name], colorFor(name, index)])
    .filter(([, v]) => v > 0);
  const sum = present.reduce((all, [, value]) => all + value, 0);
  const rows = present.map(([name, value, dot]) => [name.replaceAll("_", " "), format(value), dot]);
  return { title: row.tip ?? row.label, rows: total ? [...rows, ["total", format(sum)]] : rows };
}

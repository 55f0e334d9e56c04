// Which operators, modules and collectives the step is made of, as sortable tables.

import { card, el, safely, segmented } from "./dom.js";
import { bytes, count, flops, isNumber, list, micros, words } from "./format.js";
import { shareBar, sortableTable } from "./table.js";
import { colorOf } from "./theme.js";

const TIME_AND_CALLS = [
  {
    label: "Time",
    numeric: true,
    value: (r) => r.exclusive_us,
    cell: (r) => micros(r.exclusive_us),
    title: "exclusive time per step",
  },
  {
    label: "Calls",
    numeric: true,
    value: (r) => r.count,
    cell: (r) => count(r.count),
    title: "calls per step",
  },
];

/** Columns of operators that were added up; bars are relative to the longest row, numbers are shares of the step. */
function groupColumns(label, longest) {
  return [
    {
      label,
      grow: true,
      value: (r) => r.key,
      cell: (r) => el("code", {}, String(r.key)),
      tip: (r) => String(r.key),
    },
    {
      label: "Share of step",
      numeric: true,
      value: (r) => r.share,
      cell: (r) => shareBar(r.share, longest, colorOf(list(r.phases)[0])),
      tip: (r) => list(r.phases).map(words).join(", "),
    },
    ...TIME_AND_CALLS,
    { label: "FLOPs", numeric: true, value: (r) => r.flops, cell: (r) => flops(r.flops), title: "per step" },
  ];
}

const CALLS = [
  {
    label: "Operator",
    grow: true,
    value: (r) => r.op,
    cell: (r) => el("code", {}, String(r.op)),
    tip: (r) => `${r.op} in ${r.module || "(root)"}`,
  },
  {
    label: "Shapes",
    grow: true,
    value: (r) => r.shapes,
    cell: (r) => el("code", {}, String(r.shapes ?? "")),
    tip: (r) => `${r.shapes} ${r.dtype}`,
  },
  { label: "Phase", value: (r) => r.phase, cell: (r) => words(r.phase) },
  ...TIME_AND_CALLS,
];

function groupedCard(title, choices, report, hint) {
  const holder = el("div");
  const show = (key) => {
    const rows = list(report.show[key]).filter((r) => r && typeof r === "object");
    const longest = Math.max(0, ...rows.map((r) => (isNumber(r.share) ? r.share : 0)));
    const columns = key === "operators" ? CALLS : groupColumns(choices.find(([k]) => k === key)[2], longest);
    holder.replaceChildren(
      safely(() =>
        rows.length === 0
          ? el("p", { class: "muted" }, "No operators were recorded.")
          : sortableTable(columns, rows, { sort: key === "operators" ? 3 : 2, limit: 10 }),
      ),
    );
  };
  show(choices[0][0]);
  return card(title, { tools: [segmented(choices, choices[0][0], show, title)], hint }, holder);
}

export function operatorsCard(report) {
  return groupedCard(
    "Operators",
    [
      ["by_operator", "operator", "Operator"],
      ["by_family", "family", "Family"],
      ["operators", "shape", "Operator"],
    ],
    report,
    "Bars have the colour of the phase in which most of the time was spent.",
  );
}

export function modulesCard(report) {
  return groupedCard(
    "Modules",
    [
      ["by_layer", "layers folded", "Module"],
      ["by_module", "each", "Module"],
    ],
    report,
    "Innermost module that ran the operators, forward and backward.",
  );
}

export function collectivesCard(report) {
  const rows = list(report.show.collectives).filter((r) => r && typeof r === "object");
  if (rows.length === 0) return null;
  return card(
    "Collectives",
    { hint: "Exposed time is time in which nothing else ran." },
    sortableTable(
      [
        { label: "Kind", grow: true, value: (r) => r.kind, cell: (r) => words(r.kind) },
        { label: "Axis", value: (r) => r.axis, cell: (r) => String(r.axis || "–") },
        {
          label: "Group",
          numeric: true,
          value: (r) => r.group_size,
          cell: (r) => (r.group_size ? count(r.group_size) : "–"),
          title: "ranks",
        },
        { label: "Message", numeric: true, value: (r) => r.size_bytes, cell: (r) => bytes(r.size_bytes) },
        {
          label: "Calls",
          numeric: true,
          value: (r) => r.count,
          cell: (r) => count(r.count),
          title: "per step",
        },
        { label: "One call", numeric: true, value: (r) => r.time_us, cell: (r) => micros(r.time_us) },
        {
          label: "Exposed",
          numeric: true,
          value: (r) => r.exposed_us,
          cell: (r) => micros(r.exposed_us),
          title: "per step",
        },
      ],
      rows,
      { sort: 6, limit: 8 },
    ),
  );
}

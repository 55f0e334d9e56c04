// Turns rows into a sortable table.

import { el, safely } from "./dom.js";
import { isNumber, percent } from "./format.js";

function compare(a, b) {
  if (isNumber(a) && isNumber(b)) return a - b;
  if (isNumber(a) || isNumber(b)) return isNumber(a) ? -1 : 1; // what is not known comes last, in both directions
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

export function sortRows(rows, value, descending) {
  return rows.slice().sort((x, y) => {
    const [a, b] = [value(x), value(y)];
    return descending && isNumber(a) === isNumber(b) ? compare(b, a) : compare(a, b);
  });
}

/**
 * columns: [{label, value(row), cell(row) -> text or node, numeric, title, grow}].
 * options: sort (column index or null), descending, limit, detail(row) -> node, onorder(rows), noun.
 */
export function sortableTable(columns, rows, options = {}) {
  const state = { column: options.sort ?? null, descending: options.descending ?? true, all: false };
  const limit = options.limit ?? 12;
  const body = el("tbody");
  const heads = columns.map((column, index) =>
    el(
      "th",
      {
        scope: "col",
        class: [column.numeric && "num", column.grow && "grow"].filter(Boolean).join(" "),
      },
      el(
        "button",
        { type: "button", title: column.title ?? "sort", onclick: () => choose(index) },
        column.label,
      ),
    ),
  );
  const more = el("button", {
    type: "button",
    class: "more",
    onclick: () => {
      state.all = !state.all;
      draw();
    },
  });

  function choose(index) {
    if (state.column === index) state.descending = !state.descending;
    else Object.assign(state, { column: index, descending: Boolean(columns[index].numeric) });
    draw();
  }

  function draw() {
    const ordered =
      state.column === null ? rows : sortRows(rows, columns[state.column].value, state.descending);
    heads.forEach((head, index) =>
      head.setAttribute(
        "aria-sort",
        index !== state.column ? "none" : state.descending ? "descending" : "ascending",
      ),
    );
    const shown = state.all ? ordered : ordered.slice(0, limit);
    body.replaceChildren(...shown.flatMap((row) => tableRow(columns, row, options.detail)));
    more.hidden = rows.length <= limit;
    more.textContent = state.all
      ? `Show the first ${limit}`
      : `Show all ${rows.length} ${options.noun ?? "rows"}`;
    options.onorder?.(ordered);
  }

  draw();
  return el(
    "div",
    { class: "table-wrap" },
    el("table", {}, el("thead", {}, el("tr", {}, heads)), body),
    more,
  );
}

function tableRow(columns, row, detail) {
  const cells = columns.map((column) =>
    el(
      "td",
      {
        class: [column.numeric && "num", column.grow && "grow"].filter(Boolean).join(" "),
        title: column.tip ? column.tip(row) : null,
      },
      column.cell ? column.cell(row) : String(column.value(row) ?? ""),
    ),
  );
  if (!detail) return [el("tr", {}, cells)];
  const hidden = el("tr", { class: "detail", hidden: true });
  const toggle = () => {
    if (!hidden.firstChild)
      hidden.append(
        el(
          "td",
          { colspan: columns.length },
          safely(() => detail(row)),
        ),
      );
    hidden.hidden = !hidden.hidden;
    line.setAttribute("aria-expanded", !hidden.hidden);
  };
  const line = el(
    "tr",
    {
      class: "has-detail",
      tabindex: 0,
      "aria-expanded": false,
      onclick: toggle,
      onkeydown: (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        toggle();
      },
    },
    cells,
  );
  return [line, hidden];
}

/** A share as its number and a bar, whose length is relative to the longest share of the table. */
export function shareBar(share, longest, color) {
  const width = isNumber(share) && longest > 0 ? Math.min(100, Math.max(0, (share / longest) * 100)) : 0;
  const fill = el("div", { class: "share-fill", style: { width: `${width}%`, "background-color": color } });
  return el(
    "div",
    { class: "share" },
    el("div", { class: "share-track" }, fill),
    el("span", {}, percent(share)),
  );
}

// Makes DOM nodes from plain values. Data only ever becomes text: nothing here parses HTML.

/** el("td", {class: "num", title: "…"}, "text", node, …): attributes, `on…` listeners and `style` are set as such. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(
    ...children
      .flat()
      .filter((child) => child !== null && child !== undefined && child !== false)
      .map((child) => (child instanceof Node ? child : String(child))),
  );
  return node;
}

/** A titled card; `tools` are controls at the right of its title. */
export function card(title, { tools = [], hint = "", wide = false, id = null } = {}, ...children) {
  return el(
    "section",
    { class: wide ? "card wide" : "card", id },
    el(
      "header",
      { class: "card-head" },
      el("h2", { title: hint || null }, title),
      el("div", { class: "tools" }, tools),
    ),
    hint && el("p", { class: "hint" }, hint),
    ...children,
  );
}

/** Buttons of which one is pressed. `choices` is [[value, label], …]. */
export function segmented(choices, selected, onchoose, label) {
  const buttons = choices.map(([value, text]) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": value === selected,
        onclick: () => {
          buttons.forEach((b, i) => b.setAttribute("aria-pressed", choices[i][0] === value));
          onchoose(value);
        },
      },
      text,
    ),
  );
  buttons.forEach((b, i) => b.setAttribute("aria-pressed", choices[i][0] === selected));
  return el("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

export function swatch(color) {
  return el("span", { class: "swatch", style: { "background-color": color } });
}

/** A message in place of what cannot be shown. */
export function message(title, text, hint = "") {
  return el(
    "div",
    { class: "message", role: "alert" },
    el("strong", {}, title),
    text && el("p", {}, text),
    hint && el("p", { class: "muted" }, hint),
  );
}

function fault(error) {
  const reason = String(error?.message ?? error).slice(0, 300);
  return message(
    "This part cannot be drawn.",
    reason,
    "The report is damaged or was written by another version.",
  );
}

/** Builds a node; when the data is not what it should be, a message stands in its place. */
export function safely(build) {
  try {
    return build();
  } catch (error) {
    return fault(error);
  }
}

/** Builds a part of the page; when the data is not what it should be, a card with a message stands in its place. */
export function guarded(title, build) {
  try {
    return build();
  } catch (error) {
    return card(title, {}, fault(error));
  }
}

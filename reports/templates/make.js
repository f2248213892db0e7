"use strict";
// Creates elements; text is set as text, so that recorded values cannot become markup.
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const DRAWING = new Set(["svg", "g", "path", "polyline", "circle", "rect", "text", "tspan"]);

// make("td.name", { title: "..." }, child, ...): attributes are optional; children and attributes null and false are skipped.
function make(tag, ...rest) {
  const [name, ...classes] = tag.split(".");
  const element = DRAWING.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  const attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...rest.flat(Infinity).filter((child) => child !== null && child !== false));
  return element;
}

const left = (head) => make("th.left", head);

// Makes a table in a box that scrolls sideways. heads: texts or cells; rows: lists of texts or cells.
function table(label, classes, heads, rows) {
  const cell = (tag) => (value) => (value instanceof Element ? value : make(tag, value));
  return make(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": label },
    make(
      `table.${classes}`,
      make("thead", make("tr", heads.map(cell("th")))),
      make("tbody", rows.map((row) => (row instanceof Element ? row : make("tr", row.map(cell("td")))))),
    ),
  );
}

"use strict";
// Values to point at, and legends that hide lines. A chart is a figure with `data-chart`: what `inline.values` says.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function make(tag, text, classes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function readable(value) {
  const size = Math.abs(value);
  return value.toLocaleString("en", size && size < 1 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 2 });
}

// `hidden` holds the places of series that are not shown; a chart that is drawn again keeps it.
function interact(figure, chart, hidden = new Set()) {
  const svg = figure.querySelector("svg");
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const mark = drawn("g", { "class": "pointed" });
  svg.append(mark);

  function leave() {
    tip.hidden = true;
    mark.replaceChildren();
  }

  function place(panel, which, value) {
    const [low, high] = panel.log[which] ? panel["xy"[which]].map(Math.log) : panel["xy"[which]];
    const share = ((panel.log[which] ? Math.log(value) : value) - low) / (high - low);
    const [x0, y0, x1, y1] = panel.box;
    return which ? (y1 - share * (y1 - y0)) * height : (x0 + share * (x1 - x0)) * width;
  }

  function point(event) {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const inside = ({ box: [x0, y0, x1, y1] }) =>
      at.x > x0 * width - 8 && at.x < x1 * width + 8 && at.y > y0 * height - 8 && at.y < y1 * height + 8;
    const panel = chart.panels.find(inside);
    leave();
    if (!panel) return;
    const along = panel.along === "y" ? 1 : 0;
    const shown = panel.lines.filter((line) => !hidden.has(line.series));
    const away = (found) => Math.abs(place(panel, along, found[along]) - (along ? at.y : at.x));
    let nearest = null;
    for (const line of shown)
      for (const found of line.points) if (!nearest || away(found) < away(nearest)) nearest = found;
    if (!nearest) return;
    const rows = shown.flatMap((line) =>
      line.points.filter((found) => found[along] === nearest[along]).map((found) => ({ line, found, value: found[1 - along] })));
    const [x0, y0, x1, y1] = panel.box;
    if (!along) {
      const x = place(panel, 0, nearest[0]);
      mark.append(drawn("line", { x1: x, x2: x, y1: y0 * height, y2: y1 * height }));
    }
    for (const { line, found } of rows) {
      const ring = { cx: place(panel, 0, found[0]), cy: place(panel, 1, found[1]), r: 4, style: `stroke: ${line.color}` };
      mark.append(drawn("circle", ring));
    }
    const title = along ? panel.ticks[nearest[1]] ?? "" : `${panel.label} ${readable(nearest[0])}`;
    tip.replaceChildren(make("strong", title));
    rows.sort((one, other) => other.value - one.value);
    for (const { line, value } of rows.slice(0, 16)) {
      const row = make("div");
      const swatch = make("i");
      swatch.style.background = line.color;
      row.append(swatch, make("span", line.name), make("b", readable(value)));
      tip.append(row);
    }
    if (rows.length > 16) tip.append(make("div", `and ${rows.length - 16} more`));
    tip.hidden = false;
    const beside = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
    tip.style.left = `${Math.max(4, beside)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4))}px`;
  }

  function show(series) {
    for (const part of figure.querySelectorAll(`[data-series="${series}"]`)) {
      part.classList.toggle("off", hidden.has(series));
      if (part.closest(".legend")) part.setAttribute("aria-pressed", String(!hidden.has(series)));
    }
  }

  for (const name of figure.querySelectorAll(".legend [data-series]")) {
    const series = Number(name.dataset.series);
    const toggle = (event) => {
      event.preventDefault();
      if (!hidden.delete(series)) hidden.add(series);
      show(series);
      leave();
    };
    name.addEventListener("click", toggle);
    if (!name.querySelector("text") && !name.textContent) continue;
    name.setAttribute("role", "button");
    name.setAttribute("tabindex", "0");
    name.addEventListener("keydown", (event) => [" ", "Enter"].includes(event.key) && toggle(event));
  }
  for (const series of chart.names.keys()) show(series);
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
}

for (const figure of document.querySelectorAll("figure[data-chart]")) interact(figure, JSON.parse(figure.dataset.chart));

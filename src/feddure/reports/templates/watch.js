
// --- what a folder does, asked for every two seconds; only what has changed comes ---
const PAUSE = 2000;
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#332288", "#882255", "#7a4a2a", "#000000"];
const MOST_LINES = 12;
const LEAST_POINTS = 5; // of accuracy that a chart spans: within fewer, noise looks like a fall
const entries = new Map();
const shown = new Map(); // the sections by their names
let names = [];
let version = 0;

function lasts(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}

const percent = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(1)} %`);
const colour = (place) => `var(--${COLOURS[place % COLOURS.length].slice(1)},${COLOURS[place % COLOURS.length]})`;
const state = (one) => make("span", one.status, `state ${one.status}`);

function bar(share) {
  const made = make("span", undefined, "bar");
  const inner = make("i");
  inner.style.width = `${Math.min(100, 100 * share)}%`;
  made.append(inner);
  return made;
}

function rounds(one) {
  const cell = make("span");
  if (one.rounds) cell.append(bar(one.round / one.rounds));
  cell.append(one.rounds ? `${one.round} of ${one.rounds}` : one.round || "–");
  return cell;
}

// A table in place: rows are lists of texts or elements.
function fill(holder, columns, rows, words = []) {
  const table = make("table");
  const head = make("tr");
  for (const name of columns) head.append(make("th", name));
  table.createTHead().append(head);
  const body = table.createTBody();
  for (const row of rows) {
    const line = make("tr");
    row.forEach((value, place) => {
      const cell = make(place ? "td" : "th", undefined, words.includes(place) ? "words" : "");
      cell.append(value ?? "");
      line.append(cell);
    });
    body.append(line);
  }
  holder.replaceChildren(...(rows.length ? [table] : []));
}

// --- charts, in as many pixels as there are ---
function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

// `lines` have name, color, points and perhaps a dash; those of one name are one series. The axis spans `least` or more.
function chart(figure, title, lines, rounds, least = 0) {
  lines = lines.filter((line) => line.points.length);
  const width = Math.max(280, figure.clientWidth - 34);
  const key = JSON.stringify([title, rounds, width, lines.map(({ name, color, dash, points }) => [name, color, dash, points])]);
  if (figure.key === key) return; // somebody may be pointing at it
  figure.key = key;
  if (figure.matches(":hover")) tip.hidden = true;
  if (!lines.length) return figure.replaceChildren();
  const height = Math.min(340, Math.max(220, width * 0.4));
  const every = lines.flatMap((line) => line.points);
  const right = Math.max(1, rounds, ...every.map((found) => found[0]));
  let low = Math.min(...every.map((found) => found[1]));
  let high = Math.max(...every.map((found) => found[1]));
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  low = low >= 0 ? Math.max(0, low - margin) : low - margin;
  high += margin;
  const more = Math.max(0, least - (high - low)) / 2;
  [low, high] = [Math.max(Math.min(0, low), low - more), high + more];
  const box = [46 / width, 28 / height, 1 - 14 / width, 1 - 40 / height];
  const x = (value) => (box[0] + (value / right) * (box[2] - box[0])) * width;
  const y = (value) => (box[3] - ((value - low) / (high - low)) * (box[3] - box[1])) * height;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}` });
  svg.append(drawn("text", { x: 8, y: 15, "class": "title" }, title));
  for (const value of ticks(low, high, 6)) {
    svg.append(drawn("line", { x1: x(0), x2: x(right), y1: y(value), y2: y(value), "class": "grid" }));
    svg.append(drawn("text", { x: x(0) - 7, y: y(value) + 4, "text-anchor": "end" }, readable(value)));
  }
  for (const value of ticks(0, right, width < 500 ? 5 : 10).filter(Number.isInteger))
    svg.append(drawn("text", { x: x(value), y: y(low) + 17, "text-anchor": "middle" }, value));
  svg.append(drawn("text", { x: (x(0) + x(right)) / 2, y: height - 6, "text-anchor": "middle" }, "round"));
  svg.append(drawn("line", { x1: x(0), x2: x(right), y1: y(low), y2: y(low), "class": "axis" }));
  const series = [...new Set(lines.map((line) => line.name))];
  const legend = make("ul", undefined, "names legend");
  const told = [];
  for (const line of lines) {
    const place = series.indexOf(line.name);
    const about = { points: line.points.map(([at, value]) => `${x(at)},${y(value)}`).join(" "), "data-series": place };
    about.style = `stroke: ${line.color}${line.dash ? `; stroke-dasharray: ${line.dash}` : ""}`;
    svg.append(drawn("polyline", about));
    const [at, value] = line.points.at(-1);
    svg.append(drawn("circle", { cx: x(at), cy: y(value), r: 3, "data-series": place, style: `fill: ${line.color}` }));
    told.push({ series: place, name: line.label ?? line.name, color: line.color, points: line.points });
    if (told.findIndex((one) => one.series === place) < told.length - 1) continue;
    const item = make("li");
    item.dataset.series = place;
    const swatch = drawn("svg", { viewBox: "0 0 24 8" });
    swatch.append(drawn("line", { x1: 0, x2: 24, y1: 4, y2: 4, style: about.style }));
    item.append(swatch, line.name);
    legend.append(item);
  }
  const holder = make("div", undefined, "chart");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", `${title}: ${told.map((line) => `${line.name} at ${readable(line.points.at(-1)[1])}`).join(", ")}`);
  holder.append(svg);
  // What is hidden stays hidden when the chart is drawn again, by name: new lines may come before it.
  figure.off ??= new Set();
  const hidden = new Set(series.flatMap((name, place) => (figure.off.has(name) ? [place] : [])));
  figure.replaceChildren(holder, ...(series.length > 1 ? [legend] : []));
  const panel = { box, x: [0, right], y: [low, high], log: [false, false], along: "x", label: "round", ticks: {}, lines: told };
  interact(figure, { names: series, panels: [panel] }, hidden);
  for (const event of ["click", "keydown"])
    legend.addEventListener(event, () => (figure.off = new Set([...hidden].map((place) => series[place]))));
}

// --- sections ---
function section(name, heading) {
  if (!shown.has(name)) {
    const made = make("section", undefined, "live");
    const part = (tag, classes) => made.appendChild(make(tag, undefined, classes));
    const parts = { made, heading: part("h2"), about: part("p"), pair: part("div", "pair"), table: part("div", "scroll runs") };
    parts.accuracy = parts.pair.appendChild(make("figure"));
    parts.loss = parts.pair.appendChild(make("figure"));
    parts.clients = part("div");
    parts.opened = new Set();
    shown.set(name, parts);
  }
  const parts = shown.get(name);
  parts.heading.replaceChildren(...heading);
  return parts;
}

function newest(runs) {
  const going = (one) => ["running", "stale"].includes(one.status);
  return runs.length <= MOST_LINES ? runs : [...runs].sort((one, other) => going(other) - going(one) || other.changed - one.changed).slice(0, MOST_LINES);
}

// Returns the colours of the runs that have lines, by their ids.
function curves(parts, runs) {
  const begun = runs.filter((one) => Object.keys(one.curves).length);
  const drawn = newest(begun);
  const same = new Set(drawn.map((one) => one.method)).size === 1;
  const alike = new Map();
  const lines = drawn.map((one, place) => {
    const again = alike.get(one.method) ?? 0;
    alike.set(one.method, again + 1);
    const dash = ["", "6 3", "2 3", "8 3 2 3"][again % 4];
    return { one, name: one.label, color: same && drawn.length > 1 ? colour(place) : one.color, dash: same ? "" : dash };
  });
  const of = (which, label) => lines.map((line) => ({ ...line, points: line.one.curves[which] ?? [], label: label && `${line.name}, ${label}` }));
  const averaged = of("test_ema", "averaged").map((line) => ({ ...line, dash: "1 4" }));
  const tested = drawn.some((one) => one.curves.test);
  const more = begun.length > drawn.length ? `, ${drawn.length} of ${begun.length} runs` : "";
  const most = Math.max(...drawn.map((one) => one.rounds));
  if (tested) chart(parts.accuracy, `Test accuracy, %${more}`, [...of("test"), ...averaged], most, LEAST_POINTS);
  else chart(parts.accuracy, `Validation accuracy, %${more}`, of("validation"), most, LEAST_POINTS);
  chart(parts.loss, `Training loss${more}`, of("loss"), most);
  return new Map(lines.map((line) => [line.one.id, line.color]));
}

function clients(parts, runs) {
  const said = runs.filter((one) => one.clients.length && (one.sites || one.status !== "finished")).slice(0, 6);
  const blocks = said.map((one) => {
    const block = make("details");
    const what = one.sites ? "Sites" : "Clients";
    block.open = parts.opened.has(one.id) || (one.sites && !parts.opened.has(`closed ${one.id}`));
    block.addEventListener("toggle", () => {
      parts.opened[block.open ? "add" : "delete"](one.id);
      parts.opened[block.open ? "delete" : "add"](`closed ${one.id}`);
    });
    block.append(make("summary", `${what} of ${one.label}, and what each did last`));
    const holder = make("div", undefined, "scroll runs");
    const rows = one.clients.map(([name, round, text, bad]) => [name, round || "–", make("span", text, bad ? "bad" : "")]);
    fill(holder, [one.sites ? "site" : "client", "round", "did"], rows, [2]);
    block.append(holder);
    return block;
  });
  parts.clients.replaceChildren(...blocks);
}

function link(text, id) {
  const made = make("a", text);
  made.href = `/report/${encodeURIComponent(id)}`;
  return made;
}

function runRows(parts, runs, colours) {
  const order = { running: 0, stale: 1, failed: 2, waiting: 3, stopped: 4, finished: 5 };
  const rows = [...runs].sort((one, other) => order[one.status] - order[other.status]).map((one) => {
    const name = make("span");
    if (colours.has(one.id)) {
      const swatch = make("span", "●", "swatch");
      swatch.style.color = colours.get(one.id);
      name.append(swatch);
    }
    name.append(one.report ? link(one.label, one.id) : one.label);
    const note = [one.note, one.left_out ? `${one.left_out} updates were not finite and were left out` : ""].filter(Boolean).join("; ");
    return [name, one.method, state(one), rounds(one), percent(one.accuracy), lasts(one.left), make("span", note, one.status === "failed" || one.status === "stale" ? "bad" : "")];
  });
  const noted = rows.some((row) => row[6].textContent);
  const columns = ["run", "method", "state", "rounds", "last accuracy", "time left", ...(noted ? ["note"] : [])];
  fill(parts.table, columns, noted ? rows : rows.map((row) => row.slice(0, 6)), [6]);
}

function say(parts, one, sentences) {
  parts.about.replaceChildren(sentences.join("; ") + (sentences.length ? "." : ""));
  if (one?.report) parts.about.append(" ", link("Report", one.id));
}

function showRuns(name, group, runs) {
  for (const one of runs) one.label = group && group.id !== "." && one.id.startsWith(`${group.id}/`) ? one.id.slice(group.id.length + 1) : one.name;
  const parts = section(name, group ? [group.name, state(group)] : ["Runs"]);
  const about = [];
  if (group?.kind === "comparison") about.push(`Comparison, ${group.done} of ${group.total} runs finished`);
  if (group?.kind === "federation") about.push(`Federation ${group.title}, ${group.sites.length} sites: ${group.sites.join(", ")}`);
  if (group?.left) about.push(`about ${lasts(group.left)} left`);
  if (group?.note) about.push(group.note);
  say(parts, group, about);
  runRows(parts, runs, curves(parts, runs));
  clients(parts, runs);
  return parts;
}

function showCells(one) {
  const parts = section(one.id, [one.name, state(one)]);
  const about = [`${one.done}${one.total ? ` of ${one.total}` : ""} cells measured`];
  if (one.failed) about.push(`${one.failed} failed`);
  if (one.left) about.push(`about ${lasts(one.left)} left`);
  if (one.note) about.push(one.note);
  say(parts, one, about);
  const rows = one.cells.map((cell) => [
    cell.name, state(cell), rounds(cell), percent(cell.accuracy), percent(cell.mean),
    make("span", cell.note, cell.status === "failed" ? "bad" : ""),
  ]);
  fill(parts.table, ["cell", "state", "rounds", "last accuracy", "mean of last ten", "note"], rows, [5]);
  const lines = one.cells.slice(0, MOST_LINES).map((cell, place) => ({ name: cell.name, color: colour(place), points: cell.points }));
  chart(parts.accuracy, "Test accuracy, %", lines, Math.max(...one.cells.map((cell) => cell.rounds)), LEAST_POINTS);
  return parts;
}

function cards(every) {
  const runs = every.flatMap((one) => (one.kind === "run" ? [one] : one.cells ?? []));
  const count = (...states) => runs.filter((one) => states.includes(one.status)).length;
  const best = Math.max(...runs.map((one) => one.accuracy ?? -1));
  const left = every.filter((one) => one.left && !(one.kind === "run" && entries.get(one.parent)?.kind === "comparison")).map((one) => one.left);
  const cells = every.filter((one) => one.kind === "cells").reduce((sum, one) => sum + one.done, 0);
  const finished = count("finished") - every.flatMap((one) => one.cells ?? []).filter((one) => one.status === "finished").length + cells;
  const planned = every.filter((one) => one.kind === "cells" && one.total);
  const waiting = planned.reduce((sum, one) => sum + one.total - one.done - one.failed - one.cells.filter((cell) => cell.status === "running").length, 0);
  const found = [
    ["Running", count("running", "stale"), count("stale") ? `${count("stale")} of them stale` : ""],
    ["Finished", finished, ""],
    ["Waiting", count("waiting") + waiting, ""],
    ["Failed or stopped", count("failed", "stopped"), ""],
    ["Best accuracy", best < 0 ? "–" : percent(best), "last evaluation"],
    ["Time left", left.length ? lasts(Math.max(...left)) : "–", left.length ? "about" : ""],
  ];
  document.getElementById("cards").replaceChildren(...found.map(([what, value, note]) => {
    const card = make("div");
    card.append(make("dt", what), make("dd", value));
    if (note) card.append(make("dd", note));
    return card;
  }));
}

function draw() {
  const every = names.map((name) => entries.get(name));
  const holder = document.getElementById("groups");
  cards(every);
  if (!every.length) return holder.replaceChildren(make("p", "Nothing is here yet. Runs appear as soon as they begin.", "above"));
  const sections = [];
  for (const one of every.filter((one) => one.kind !== "run")) {
    const own = every.filter((run) => run.kind === "run" && run.parent === one.id);
    const parts = one.kind === "cells" ? showCells(one) : showRuns(one.id, one, own);
    sections.push({ parts, going: one.status === "running", changed: Math.max(one.changed, ...own.map((run) => run.changed ?? 0)) });
  }
  const single = every.filter((one) => one.kind === "run" && !(entries.get(one.parent)?.kind in { comparison: 1, federation: 1 }));
  if (single.length) {
    const parts = showRuns("", null, single);
    sections.push({ parts, going: single.some((one) => one.status === "running"), changed: Math.max(...single.map((run) => run.changed)) });
  }
  // What trains stands first, in an order that stays, then what has changed last.
  sections.sort((one, other) => other.going - one.going || (one.going ? 0 : other.changed - one.changed));
  const wanted = sections.map(({ parts }) => parts.made);
  if (wanted.some((made, place) => holder.children[place] !== made) || holder.children.length !== wanted.length) {
    holder.replaceChildren(...wanted);
    return draw(); // charts are as wide as where they stand
  }
}

async function ask() {
  const connection = document.getElementById("connection");
  try {
    const answer = await fetch(`/state?after=${version}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    document.getElementById("title").textContent = found.folder;
    document.title = `${found.folder} · feddure`;
    const changed = found.version !== version || !document.getElementById("cards").children.length;
    names = found.names;
    version = found.version;
    for (const [name, entry] of Object.entries(found.changed)) entries.set(name, { ...entry, id: name });
    for (const name of entries.keys()) if (!names.includes(name)) entries.delete(name);
    if (changed) draw();
    connection.textContent = `Live; last looked at ${new Date().toLocaleTimeString()}.`;
    connection.className = "";
  } catch {
    connection.textContent = "feddure watch does not answer; this is what it said last.";
    connection.className = "bad";
    version = 0; // another one may start there
  }
  setTimeout(ask, PAUSE);
}

addEventListener("resize", () => names.length && draw());
ask();

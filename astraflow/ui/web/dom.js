// Elements, and how values are told. Text is only ever set as text.

/** Makes an element: `h("td.num", { title: "…", onclick: f, style: { width: "3px" } }, "text", …)`. */
export function h(what, props = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") {
      for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    } else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element of a drawing. */
export function s(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

// Made once: each takes longer to make than a row of a table.
const WHOLE = new Intl.NumberFormat("en");
const LARGE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Tells a number in few digits; a dash where there is none. */
export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return WHOLE.format(value);
  if (size >= 1000) return LARGE.format(value);
  if (size > 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function signed(value) {
  return value > 0 ? `+${num(value)}` : num(value).replace("-", "−");
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${num(100 * share, 2)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${num(1e6 * value, 2)} µs`;
  if (value < 1) return `${num(1e3 * value, 2)} ms`;
  if (value < 120) return `${num(value, 3)} s`;
  if (value < 7200) return `${num(value / 60, 3)} min`;
  return `${num(value / 3600, 3)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e3) return `${value} B`;
  if (value < 1e6) return `${num(value / 1e3, 3)} kB`;
  return value < 1e9 ? `${num(value / 1e6, 3)} MB` : `${num(value / 1e9, 3)} GB`;
}

/** Says how the values of a metric are told, from its name. */
export function unitOf(metric) {
  if (/_frac(\/|$)|\/frac$/.test(metric)) return { label: "%", tell: percent };
  if (/_s$/.test(metric) && !/_per_s$/.test(metric)) return { label: "s", tell: seconds };
  if (/bytes$/.test(metric)) return { label: "B", tell: bytes };
  if (/tokens_per_s$/.test(metric)) return { label: "tokens/s", tell: (v) => `${num(v)} tok/s` };
  if (/^lag\//.test(metric)) return { label: "versions", tell: (v) => num(v) };
  if (/length\/|tokens$/.test(metric)) return { label: "tokens", tell: (v) => num(v) };
  return { label: "", tell: (v) => num(v) };
}

/** A part of an id that differs: members and tasks are named after their run. */
export function short(id) {
  return id.replace(/^(raas|trainer|task|group|batch)-.*-(\d+(\/.*)?)$/, "$1-$2").replace("eval-group-", "eval ");
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The colour of the nth curve, node or version. */
export function colour(n) {
  return css(`--series-${n % 8}`);
}

/** The least and the largest of numbers, of which there may be more than a call takes arguments. */
export function extent(values) {
  return values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
}

/** A title over a part of a view, with what explains it. */
export function part(title, hint, ...children) {
  return h("section.part", {}, h("header.part-head", {}, h("h2", {}, title), hint ? h("p.hint", {}, hint) : null), ...children);
}

/** Facts as pairs of a name and a value. */
export function facts(pairs) {
  return h("dl.facts", {}, pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function table(columns, rows) {
  const head = columns.map((each) => h(each.num ? "th.num" : "th", { scope: "col" }, each.name));
  const cell = (each, row) => h(each.num ? "td.num" : "td", {}, each.tell(row));
  return h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((each) => cell(each, row)))))));
}

/** Buttons of which one is pressed. */
export function choice(label, options, chosen, pick) {
  const made = options.map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => pick(value) }, text));
  return h("div.choice", { role: "group", "aria-label": label }, made);
}

export function empty(text) {
  return h("p.empty", {}, text);
}

/** The address of a view. */
export function link(view, parts = [], query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const text = new URLSearchParams(kept).toString();
  return `#/${[view, ...parts].map((each) => encodeURIComponent(each)).join("/")}${text ? `?${text}` : ""}`;
}

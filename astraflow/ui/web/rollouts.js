// All recorded rollouts as one table; only what is seen of it is fetched and drawn.

import { exported, rollouts as fetchRollouts } from "./api.js";
import { bytes, h, link, num, short, signed } from "./dom.js";

const ROW_PX = 34;
const PAGE = 200;
const AGAIN_MS = 1000;
const CLOCK = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

const COLUMNS = [
  { name: "time", text: "Time", tell: (row) => CLOCK.format(1000 * row.time) },
  { name: "step", text: "Step", num: true, tell: (row) => (row.step === null ? "–" : row.step) },
  { name: "prompt", text: "Prompt", tell: (row) => row.prompt },
  { name: "sample", text: "Sample", num: true, tell: (row) => row.sample },
  { name: "reward", text: "Reward", num: true, tell: (row) => num(row.reward) },
  { name: "advantage", text: "Advantage", num: true, tell: (row) => (row.advantage === null ? "–" : signed(row.advantage)) },
  { name: "tokens", text: "Tokens", num: true, tell: (row) => num(row.tokens) },
  { name: "version", text: "Version", num: true, tell: (row) => num(row.version) },
  { name: "member", text: "Node", tell: (row) => short(row.member) },
  { name: "outcome", text: "Outcome", tell: (row) => row.outcome },
  { name: "purpose", text: "Purpose", tell: (row) => row.purpose },
];

export async function rollouts({ place, run, query }) {
  const state = { sort: "-time", ...query };
  const pages = new Map();
  let total = { found: 0, total: 0 };
  let turn = 0;
  let timer = null;
  let frame = 0;
  // What is drawn now: by its place, the row and its element.
  const drawn = new Map();
  const count = h("p.hint", { role: "status" });
  const heads = h("div.vhead", { role: "row" });
  const body = h("div.vbody", { role: "rowgroup" });
  const view = h("div.vtable", { role: "table", "aria-label": "Recorded rollouts", tabindex: "0" }, heads, body);
  const filters = h("div.bar");
  place.append(h("h1", {}, "Rollouts"), count, filters, view);

  function change(fields) {
    Object.assign(state, fields);
    history.replaceState(null, "", link("rollouts", [run.key], state));
    view.scrollTop = 0;
    reload();
  }

  function drawHeads() {
    heads.replaceChildren(...COLUMNS.map((column) => {
      const sorted = state.sort.replace("-", "") === column.name ? (state.sort.startsWith("-") ? "descending" : "ascending") : "none";
      const next = sorted === "ascending" ? `-${column.name}` : column.name;
      return h("div", { role: "columnheader", "aria-sort": sorted, class: `c-${column.name} ${column.num ? "num" : ""}` },
        h("button", { type: "button", onclick: () => change({ sort: next }) }, column.text, h("i", { "aria-hidden": "true" }, { ascending: " ↑", descending: " ↓", none: "" }[sorted])));
    }));
  }

  function drawFilters(words) {
    const select = (name, text) => {
      if ((words[name]?.length ?? 0) < 2) return null;
      const options = words[name].map((each) => h("option", { value: each, selected: state[name] === each }, short(each)));
      return h("select", { "aria-label": text, onchange: (event) => change({ [name]: event.target.value }) }, h("option", { value: "" }, text), options);
    };
    const number = (name, text) => h("input", { type: "number", step: "any", placeholder: text, "aria-label": text, value: state[name] ?? "", onchange: (event) => change({ [name]: event.target.value }) });
    filters.replaceChildren(...[
      h("input.wide", { type: "search", placeholder: "id of a prompt, group or rollout", "aria-label": "Search ids", value: state.text ?? "", onchange: (event) => change({ text: event.target.value }) }),
      number("reward.min", "reward ≥"), number("reward.max", "reward ≤"), number("step.min", "step ≥"), number("step.max", "step ≤"),
      select("purpose", "any purpose"), select("outcome", "any outcome"), select("member", "any node"), select("policy", "any policy"),
    ].filter(Boolean));
  }

  async function reload() {
    clearTimeout(timer);
    turn += 1;
    pages.clear();
    drawHeads();
    const mine = turn;
    const first = await page(0);
    // Of two that were asked for, the earlier may come later.
    if (mine !== turn) return;
    total = first;
    if (!filters.firstChild || total.left_nbytes) drawFilters(total.words);
    const left = total.left_nbytes && !exported() ? `; ${bytes(total.left_nbytes)} are still being read` : "";
    const all = exported() && total.total > total.rows.length ? ` of ${num(total.total)}, the newest` : "";
    count.textContent = total.found === total.total || exported()
      ? `${num(total.found)} recorded rollouts${all}${left}` : `${num(total.found)} of ${num(total.total)} recorded rollouts${left}`;
    draw();
    if (left) timer = setTimeout(reload, AGAIN_MS);
  }

  async function page(number) {
    const mine = turn;
    pages.set(number, null);
    const found = await fetchRollouts(run.key, { ...state, offset: number * PAGE, limit: PAGE });
    if (mine === turn) pages.set(number, found.rows);
    return found;
  }

  function draw() {
    body.style.height = `${total.found * ROW_PX}px`;
    const first = Math.max(0, Math.floor(view.scrollTop / ROW_PX) - 8);
    const last = Math.min(total.found, first + Math.ceil(view.clientHeight / ROW_PX) + 16);
    for (const [at, { element }] of drawn) {
      if (at >= first && at < last) continue;
      element.remove();
      drawn.delete(at);
    }
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    let before = null;
    for (let at = first; at < last; at++) {
      const number = Math.floor(at / PAGE);
      if (!pages.has(number)) page(number).then(later, () => pages.delete(number));
      const row = pages.get(number)?.[at % PAGE];
      const old = drawn.get(at);
      const element = old && old.row === row ? old.element : line(at, row);
      if (element !== old?.element) {
        old?.element.remove();
        if (before) before.after(element);
        else body.prepend(element);
        drawn.set(at, { row, element });
      }
      before = element;
    }
    if (focused !== null) body.querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
  }

  /** Draws with the next frame, once, however much there is to draw. */
  function later() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(draw);
  }

  function line(at, row) {
    const style = { top: `${at * ROW_PX}px` };
    if (!row) return h("div.vrow.loading", { style, role: "row" });
    const cells = COLUMNS.map((column) => {
      const value = column.tell(row);
      return h("span", { role: "cell", class: `c-${column.name} ${column.num ? "num" : ""}`, title: typeof value === "string" ? value : null }, value);
    });
    return h("a.vrow", { style, role: "row", href: link("rollout", [run.key, row.id]), dataset: { at } }, cells);
  }

  view.addEventListener("scroll", later, { passive: true });
  view.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const at = Math.min(Math.max(Number(document.activeElement.dataset?.at ?? -1) + move, 0), total.found - 1);
    const top = at * ROW_PX;
    if (top < view.scrollTop || top > view.scrollTop + view.clientHeight - 3 * ROW_PX) view.scrollTop = top - view.clientHeight / 2;
    draw();
    body.querySelector(`[data-at="${at}"]`)?.focus({ preventScroll: true });
  });
  place.addEventListener("shown", draw, { once: true });
  await reload();
  return () => {
    clearTimeout(timer);
    cancelAnimationFrame(frame);
  };
}

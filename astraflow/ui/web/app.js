// The frame of the page: which view is shown, of which runs, and in which theme.

import { configure, exported, get } from "./api.js";
import { books } from "./books.js";
import { curves } from "./curves.js";
import { choice, empty, h, link } from "./dom.js";
import { rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";
import { step } from "./step.js";
import { timeline } from "./timeline.js";

const VIEWS = { curves, step, rollouts, rollout, timeline, books };
const TABS = [["curves", "Curves"], ["step", "Steps"], ["rollouts", "Rollouts"], ["timeline", "Timeline"], ["books", "Books"]];
const LOOK_MS = 3000;
// A view that takes longer says so.
const PATIENCE_MS = 300;

const page = { overview: null, main: null, nav: null, dispose: null, turn: 0 };

export async function start(settings) {
  configure(settings);
  page.nav = document.querySelector("nav");
  page.main = document.querySelector("main");
  document.querySelector("header.top").append(themes());
  try {
    page.overview = await get("runs");
  } catch (error) {
    page.main.replaceChildren(empty(error.message));
    return;
  }
  addEventListener("hashchange", () => show());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  await show();
  if (!exported()) setInterval(look, LOOK_MS);
}

/** What the address says: `#/view/part/part?key=value`. */
export function where() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...parts] = path.split("/").map(decodeURIComponent);
  return { view: VIEWS[view] ? view : "curves", parts, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

async function show() {
  const turn = ++page.turn;
  const { view, parts, query } = where();
  page.dispose?.();
  page.dispose = null;
  tabs(view, parts);
  const place = h("div.view", { class: `view view-${view}` });
  const patience = setTimeout(() => page.main.replaceChildren(empty("Reading the run …")), PATIENCE_MS);
  const run = page.overview.runs.find((each) => each.key === parts[0]) ?? page.overview.runs[0];
  try {
    const dispose = await VIEWS[view]({ place, overview: page.overview, run, parts: parts.slice(1), query });
    if (turn !== page.turn) {
      dispose?.();
      return;
    }
    page.dispose = dispose ?? null;
  } catch (error) {
    if (turn !== page.turn) return;
    place.replaceChildren(empty(error.message));
  } finally {
    clearTimeout(patience);
  }
  const isSame = page.main.firstElementChild?.className === place.className;
  const top = scrollY;
  page.main.replaceChildren(place);
  place.dispatchEvent(new Event("shown"));
  scrollTo(0, isSame ? top : 0);
}

function tabs(view, parts) {
  const { runs } = page.overview;
  const key = parts[0] ?? runs[0].key;
  const current = view === "rollout" ? "rollouts" : view;
  const made = TABS.map(([name, text]) =>
    h("a", { href: name === "curves" ? link(name) : link(name, [key]), "aria-current": name === current ? "page" : null }, text));
  const pick = h("select", { "aria-label": "Run", onchange: (event) => { location.hash = link(view === "rollout" ? "rollouts" : view, [event.target.value]); } },
    runs.map((run) => h("option", { value: run.key, selected: run.key === key }, run.key)));
  page.nav.replaceChildren(...made, view !== "curves" && runs.length > 1 ? pick : "");
  document.title = `${TABS.find(([name]) => name === current)?.[1] ?? ""} · ${key} · astraflow`;
}

function themes() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  return choice("Theme", [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], chosen, (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      if (theme === "auto") localStorage.removeItem("astraflow-theme");
      else localStorage.setItem("astraflow-theme", theme);
    } catch {
      // It holds as long as the page is open.
    }
    document.querySelector("header.top .choice").replaceWith(themes());
    show();
  });
}

/** Shows what is new of live runs, unless somebody is at work in the view. */
async function look() {
  if (!page.overview.runs.some((run) => run.is_live) || document.hidden) return;
  try {
    page.overview = await get("runs");
  } catch {
    return;
  }
  const { view } = where();
  const isBusy = page.main.contains(document.activeElement) && document.activeElement !== page.main;
  if (["curves", "timeline", "books"].includes(view) && !isBusy) show();
}

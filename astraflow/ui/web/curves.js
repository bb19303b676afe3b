// Curves of several runs over each other; a click on a step opens what it was trained on.

import { get } from "./api.js";
import { choice, colour, css, h, link, num, part, seconds, table, unitOf } from "./dom.js";
import { plot, smoothed } from "./plot.js";

const FIRST = "reward/mean";
const MINIS = ["train/entropy", "lag/mean", "response/length/mean", "group/zero_std_frac", "mismatch/kl", "train/grad_norm", "time/wait_batch_frac", "perf/tokens_per_s"];

export async function curves({ place, overview, query }) {
  const { runs, differences } = overview;
  const state = { metric: FIRST, x: "step", smooth: "1", band: "on", hidden: "", ...query };
  const hidden = new Set(state.hidden.split(",").filter(Boolean));
  const shown = runs.filter((run) => !hidden.has(run.key));
  const metrics = [...new Set(runs.flatMap((run) => run.metrics))].sort();
  if (!metrics.includes(state.metric)) state.metric = metrics[0] ?? FIRST;
  const go = (change) => { location.hash = link("curves", [], { ...state, ...change }); };
  const colours = new Map();
  for (const run of runs) for (const policy of run.policies) colours.set(`${run.key}/${policy}`, colour(colours.size));

  const chips = runs.map((run) => {
    const toggle = () => {
      if (hidden.has(run.key)) hidden.delete(run.key);
      else hidden.add(run.key);
      go({ hidden: [...hidden].join(",") });
    };
    return h("button.chip", { type: "button", "aria-pressed": String(!hidden.has(run.key)), onclick: toggle },
      run.policies.map((policy) => h("i", { style: { background: colours.get(`${run.key}/${policy}`) } })),
      run.key, h("span.state", { class: `state ${run.state}` }, run.state));
  });
  const pick = h("select", { "aria-label": "Metric", onchange: (event) => go({ metric: event.target.value }) }, grouped(metrics, state.metric));
  const smooth = h("label.field", {}, "mean of ", h("input", { type: "number", min: 1, max: 500, value: state.smooth, "aria-label": "Steps to take the mean of", onchange: (event) => go({ smooth: event.target.value }) }), " steps");
  const big = h("figure.plot", { "aria-label": `${state.metric} over the ${state.x}` });
  const minis = h("div.minis");
  const unit = unitOf(state.metric);
  place.append(
    h("div.bar", {}, h("div.chips", { role: "group", "aria-label": "Runs" }, chips)),
    h("section.part", {},
      h("div.bar", {}, pick, unit.label ? h("span.unit", {}, unit.label) : null, h("span.grow"),
        smooth, choice("Band", [["on", "Band"], ["off", "No band"]], state.band, (band) => go({ band })),
        choice("Axis", [["step", "Step"], ["version", "Version"], ["time", "Time"]], state.x, (x) => go({ x }))),
      big,
      h("p.hint", {}, bandHint(state), " Click a point to see what that step was trained on; drag to zoom, double-click to zoom out.")),
    minis,
    part("Runs", null, table([
      { name: "run", tell: (run) => run.key },
      { name: "state", tell: (run) => run.state },
      { name: "steps", num: true, tell: (run) => num(run.steps) },
      { name: "reward, first → last steps", num: true, tell: (run) => `${num(run.reward_first)} → ${num(run.reward_last)}` },
      { name: "held-out accuracy", num: true, tell: (run) => num(run.accuracy) },
      { name: "tokens/s", num: true, tell: (run) => num(run.tokens_per_s) },
      { name: "wall time", num: true, tell: (run) => (run.wall_s ? seconds(run.wall_s) : "–") },
    ], runs)),
    runs.length > 1 ? part("Keys in which the recipes differ", null, changes(runs, differences)) : "",
  );

  const disposals = [];
  const [main, evals] = await Promise.all([load(shown, state.metric), state.metric === FIRST ? measured(shown, state, colours) : []]);
  const wanted = MINIS.filter((name) => metrics.includes(name) && name !== state.metric);
  let isGone = false;
  place.addEventListener("shown", () => {
    const options = { xLabel: state.x, isTime: state.x === "time", tellX: (v) => num(v) };
    disposals.push(plot(big, { ...options, curves: [...main.map((each) => curveOf(each, state, colours)), ...evals], tellY: unit.tell }));
    for (const name of wanted) {
      const figure = h("figure.plot");
      minis.append(h("button.mini", { type: "button", title: `Show ${name}`, onclick: () => go({ metric: name }) }, h("span", {}, name), figure));
      load(shown, name).then((found) => {
        if (isGone) return;
        const drawn = found.map((each) => ({ ...curveOf(each, { ...state, band: "off" }, colours), open: null }));
        disposals.push(plot(figure, { ...options, curves: drawn, height: 96, isSmall: true, tellY: num }));
      }, (error) => figure.append(error.message));
    }
  }, { once: true });
  return () => {
    isGone = true;
    disposals.forEach((dispose) => dispose());
  };
}

function bandHint({ metric, band, smooth }) {
  if (band === "off") return "";
  if (metric === FIRST && Number(smooth) <= 1) return "The band is where the mean of all rollouts lies, with 95 %.";
  return Number(smooth) > 1 ? `The band is one standard deviation over ${smooth} steps.` : "";
}

function grouped(metrics, chosen) {
  const groups = new Map();
  for (const name of metrics) {
    const group = name.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  return [...groups].map(([name, members]) => h("optgroup", { label: name }, members.map((each) => h("option", { value: each, selected: each === chosen }, each))));
}

async function load(runs, metric) {
  const found = await Promise.all(runs.filter((run) => run.metrics.includes(metric)).map(async (run) => [run, await get(`runs/${run.key}/curves/${metric}`)]));
  const several = new Set(found.flatMap(([run]) => run.key)).size > 1;
  return found.flatMap(([run, policies]) => Object.entries(policies).map(([policy, columns]) => ({
    run, policy, columns, name: several || Object.keys(policies).length < 2 ? `${run.key}${Object.keys(policies).length > 1 ? ` ${policy}` : ""}` : policy,
  })));
}

function curveOf({ run, policy, columns, name }, state, colours) {
  const count = Math.max(1, Number(state.smooth) || 1);
  const { mean, std } = count > 1 ? smoothed(columns.value, count) : { mean: columns.value, std: columns.error };
  const has = state.band === "on" && std;
  const x = state.x === "time" ? columns.time.map((each) => Date.parse(each) / 1000) : columns[state.x];
  const [xs, ys, deviations, steps] = rising(x, mean, has ? std : mean, columns.step);
  const shift = (sign) => ys.map((each, at) => (each === null || deviations[at] === null ? null : each + sign * deviations[at]));
  return {
    name, colour: colours.get(`${run.key}/${policy}`), x: xs, y: ys,
    ...(has ? { low: shift(-1), high: shift(1) } : {}),
    open: (index) => { location.hash = link("step", [run.key, policy, steps[index]]); },
  };
}

/** Keeps the last of those that share an x: two steps may have one version. */
function rising(x, ...columns) {
  const kept = x.map((_, at) => at).filter((at) => x[at] !== null && x[at] !== x[at + 1]);
  return [x, ...columns].map((column) => kept.map((at) => column[at]));
}

async function measured(runs, state, colours) {
  const found = await Promise.all(runs.map(async (run) => [run, await get(`runs/${run.key}/evals`)]));
  return found.flatMap(([run, rows]) => {
    const done = rows.filter((row) => row.state === "succeeded" && row.overall);
    const suites = [...new Set(done.map((row) => row.suite))];
    return suites.map((suite) => {
      const points = new Map(done.filter((row) => row.suite === suite)
        .map((row) => [state.x === "time" ? Date.parse(row.create_time) / 1000 : Math.min(...Object.values(row.versions)), row.overall.mean_reward]));
      const x = [...points.keys()].sort((a, b) => a - b);
      return { name: `${run.key} ${suite}, measured`, colour: runs.length > 1 ? colours.get(`${run.key}/${run.policies[0]}`) : css("--ink"), x, y: x.map((each) => points.get(each)), points: true };
    });
  });
}

function changes(runs, differences) {
  const rows = Object.entries(differences);
  if (!rows.length) return h("p.empty", {}, "Their recipes are the same.");
  const tell = (value) => (value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  return table([{ name: "key", tell: ([key]) => h("code", {}, key) }, ...runs.map((run, at) => ({ name: run.key, tell: ([, values]) => tell(values[at]) }))], rows);
}

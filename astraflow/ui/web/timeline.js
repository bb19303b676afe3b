// Members on a timeline, versions spreading over the nodes, and who waits for whom.

import { get } from "./api.js";
import { bytes, colour, css, empty, extent, h, num, part, percent, s, seconds, short, table } from "./dom.js";
import { plot } from "./plot.js";

const LANE_PX = 30;
const NAME_PX = 150;

export async function timeline({ place, run }) {
  const [found, status] = await Promise.all([get(`runs/${run.key}/timeline`), get(`runs/${run.key}/status`)]);
  const lanes = lanesOf(found, status);
  if (!lanes.length) {
    place.append(h("h1", {}, "Timeline"), empty("Nobody has joined yet."));
    return;
  }
  const times = lanes.flatMap((lane) => [lane.from, lane.to, ...lane.ticks.map((tick) => tick.time)]).filter(Number.isFinite);
  const [start, end] = extent(times);
  const drawing = h("div.lanes");
  const spreading = h("figure.plot", { "aria-label": "Version on each node over time" });
  place.append(
    h("h1", {}, "Timeline"),
    part("Members", "Trainers: dark while they train, light while they wait for a batch. Nodes: a mark where a version went live, red where it failed.", drawing),
    part("Who waits for whom", run.is_live ? "Now, link by link, as the hub says." : "Over the whole run: the share of its time that each had nothing to do.", waits(status, lanes)),
    part("Versions over the nodes", "A step of a line is a version that went live there.", spreading),
    part("How versions came to the nodes", null, pulls(found.versions, lanes)),
  );
  const disposals = [];
  place.addEventListener("shown", () => {
    const draw = () => drawing.replaceChildren(lanesDrawn(lanes, start, end, Math.max(drawing.clientWidth, 320)));
    const watch = new ResizeObserver(draw);
    watch.observe(drawing);
    disposals.push(() => watch.disconnect());
    const nodes = lanes.filter((lane) => lane.ticks.length);
    disposals.push(plot(spreading, {
      curves: nodes.map((lane, at) => stepped(lane, colour(at), start)), height: 260, xLabel: "seconds since the start",
      tellX: (v) => num(v), tellY: (v) => num(v),
    }));
  }, { once: true });
  return () => disposals.forEach((dispose) => dispose());
}

function lanesOf({ trainers, versions }, status) {
  const members = new Map((status.members ?? []).map((each) => [each.member_id, each]));
  const lanes = new Map();
  const time = (text) => (text ? Date.parse(text) / 1000 : NaN);
  for (const [id, each] of members) {
    const until = each.leave_time ?? status.server_time ?? status.end_time;
    lanes.set(id, { id, name: each.name, role: each.role, from: time(each.join_time), to: time(until), ticks: [], busy: [], member: each, why: each.left_because });
  }
  versions.member.forEach((id, at) => {
    if (!lanes.has(id)) lanes.set(id, { id, name: short(id), role: "raas", from: NaN, to: NaN, ticks: [], busy: [] });
    lanes.get(id).ticks.push({ time: time(versions.time[at]), version: versions.version[at], policy: versions.policy[at], isFailed: versions.state[at] === "failed" });
  });
  for (const [policy, steps] of Object.entries(trainers)) {
    const id = [...lanes.values()].find((lane) => lane.role === "trainer" && lane.name === `trainer-${policy}`)?.id ?? policy;
    if (!lanes.has(id)) lanes.set(id, { id, name: `trainer ${policy}`, role: "trainer", from: NaN, to: NaN, ticks: [], busy: [] });
    steps.time.forEach((text, at) => {
      const [end, train, wait] = [time(text), steps.train_s[at] ?? 0, steps.wait_s[at] ?? 0];
      lanes.get(id).busy.push({ end, train, wait, step: steps.step[at] });
    });
  }
  for (const lane of lanes.values()) {
    const seen = [...lane.ticks.map((tick) => tick.time), ...lane.busy.flatMap((each) => [each.end - each.train - each.wait, each.end])];
    const [first, last] = extent(seen);
    if (Number.isNaN(lane.from)) lane.from = first;
    if (Number.isNaN(lane.to)) lane.to = Math.max(last, lane.from);
  }
  return [...lanes.values()].sort((a, b) => a.role.localeCompare(b.role) * -1 || a.name.localeCompare(b.name, "en", { numeric: true }));
}

function lanesDrawn(lanes, start, end, width) {
  const height = lanes.length * LANE_PX + 28;
  const x = (time) => NAME_PX + ((time - start) / Math.max(end - start, 1e-9)) * (width - NAME_PX - 12);
  const drawing = s("svg", { width, height, role: "img", "aria-label": "Members over time" });
  const every = roundStep((end - start) / Math.max(2, Math.floor((width - NAME_PX) / 100)));
  for (let time = start; time <= end; time += every) {
    drawing.append(s("line", { x1: x(time), x2: x(time), y1: 0, y2: height - 22, class: "grid" }),
      s("text", { x: x(time), y: height - 6, "text-anchor": time === start ? "start" : "middle", class: "axis" }, seconds(Math.round(time - start))));
  }
  lanes.forEach((lane, at) => drawing.append(...laneDrawn(lane, at * LANE_PX + 6, x)));
  return drawing;
}

/** The next number of seconds that reads well: 1, 2, 5, 10, 30 s, 1 min and so on. */
function roundStep(least) {
  const known = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200];
  return known.find((each) => each >= least) ?? 86400 * Math.ceil(least / 86400);
}

function laneDrawn(lane, y, x) {
  const tall = LANE_PX - 12;
  const name = s("text", { x: 0, y: y + tall / 2 + 4, class: "lane-name" }, lane.name);
  const about = s("title", {}, `${lane.name}${lane.why ? `: ${lane.why}` : ""}`);
  const whole = s("rect", { x: x(lane.from), y, width: Math.max(2, x(lane.to) - x(lane.from)), height: tall, rx: 3, class: "lane" }, about);
  const strip = (from, to) => `M${x(from).toFixed(1)} ${y + tall / 2}H${Math.max(x(to), x(from) + 0.6).toFixed(1)}`;
  const wait = lane.busy.map((each) => strip(Math.max(lane.from, each.end - each.train - each.wait), each.end - each.train)).join("");
  const train = lane.busy.map((each) => strip(Math.max(lane.from, each.end - each.train), each.end)).join("");
  const seen = new Set();
  const ticks = lane.ticks.filter((tick) => {
    const key = `${Math.round(x(tick.time))}${tick.isFailed}`;
    return !seen.has(key) && seen.add(key);
  }).map((tick) => s("rect", { x: x(tick.time), y: y + 2, width: tick.isFailed ? 2.5 : 1.5, height: tall - 4, class: tick.isFailed ? "tick failed" : "tick" },
    s("title", {}, `${tick.policy} version ${tick.version} ${tick.isFailed ? "failed" : "went live"}`)));
  return [name, whole, s("path", { d: wait, class: "wait", "stroke-width": tall }), s("path", { d: train, class: "train", "stroke-width": tall }), ...ticks];
}

/** A line that goes up where a version went live. */
function stepped(lane, own, start) {
  const x = [];
  const y = [];
  for (const tick of lane.ticks.filter((each) => !each.isFailed)) {
    if (y.length) {
      x.push(tick.time - start - 1e-6);
      y.push(y.at(-1));
    }
    x.push(tick.time - start);
    y.push(tick.version);
  }
  return { name: lane.name, colour: own, x, y };
}

function waits(status, lanes) {
  if (status.waits) {
    if (!status.waits.length) return empty("Nobody waits for anything.");
    const depths = new Map();
    return h("ol.waits", {}, status.waits.map((wait) => {
      const depth = (depths.get(wait.waiter_id) ?? 0) + 1;
      if (wait.subject_id && !depths.has(wait.subject_id)) depths.set(wait.subject_id, depth);
      return h("li", { style: { "margin-left": `${24 * (depth - 1)}px` } }, h("b", {}, short(wait.waiter_id)), ` ${wait.message}`);
    }));
  }
  const known = lanes.filter((lane) => lane.member?.load);
  const shares = known.map((lane) => [lane.name, lane.member.load.wait_fraction]);
  if (status.hub) shares.push(["hub", status.hub.idle_fraction]);
  if (!shares.length) return empty("The hub left no account: it was killed before its end.");
  return h("div.shares", {}, shares.map(([name, share]) => h("div", {}, h("span", {}, name), h("span.share", {}, h("i", { style: { width: `${100 * share}%`, background: css("--accent") } })), h("span.num", {}, percent(share)))));
}

function pulls(versions, lanes) {
  const names = new Map(lanes.map((lane) => [lane.id, lane.name]));
  const rows = [...new Set(versions.member)].map((id) => {
    const own = versions.member.map((each, at) => (each === id ? at : -1)).filter((at) => at >= 0);
    const live = own.filter((at) => versions.state[at] !== "failed");
    const middle = (name) => median(live.map((at) => versions[name][at]).filter((each) => each !== null));
    return { name: names.get(id), count: live.length, failed: own.length - live.length, pull: middle("pull_s"), pause: middle("pause_s"), nbytes: live.reduce((sum, at) => sum + (versions.pulled_nbytes[at] ?? 0), 0) };
  });
  if (!rows.length) return empty("No version has gone live on a node yet.");
  return table([
    { name: "node", tell: (row) => row.name },
    { name: "versions", num: true, tell: (row) => num(row.count) },
    { name: "failed", num: true, tell: (row) => num(row.failed) },
    { name: "pulled", num: true, tell: (row) => bytes(row.nbytes) },
    { name: "pull, median", num: true, tell: (row) => seconds(row.pull) },
    { name: "pause for the swap, median", num: true, tell: (row) => seconds(row.pause) },
  ], rows.sort((a, b) => a.name.localeCompare(b.name)));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

// One rollout as text: every token with its version, mask, log-probability and advantage.

import { get } from "./api.js";
import { choice, colour, css, empty, extent, facts, h, link, num, part, seconds, short, signed, table } from "./dom.js";
import { spans } from "./step.js";

const MODES = [["mask", "Sampled"], ["version", "Version"], ["logprob", "Log-probability"], ["advantage", "Advantage"]];
// A token of this log-probability, e^-5 = 0.7 %, has the full colour.
const DEEP = 5;

export async function rollout({ place, run, parts, query }) {
  if (query.step) return unrecorded(place, run, parts.join("/"), query);
  const found = await get(`runs/${run.key}/rollouts/${parts.join("/")}`);
  const mode = query.by ?? "mask";
  const go = (change) => { location.hash = link("rollout", [run.key, found.rollout_id], { ...query, ...change }); };
  const tokens = found.trajectories.flatMap((each, index) => tokensOf(each, index, found));
  tokens.forEach((token, number) => { token.number = number; });
  const side = h("aside.side");
  place.append(
    h("div.title", {}, h("h1", {}, `Rollout ${short(found.rollout_id)}`), h("span.sub", {}, `${found.outcome}${found.purpose === "eval" ? ", of an evaluation" : ""}`)),
    h("div.columns", {},
      h("div.text", {},
        h("div.bar", {}, h("span.hint", {}, "Colour"), choice("Colour of the tokens", MODES, mode, (by) => go({ by })), h("span.grow"), legend(mode, tokens)),
        found.message ? h("p.failure", {}, `${found.reason}: ${found.message}`) : "",
        promptOf(found), found.trajectories.map((each, index) => trajectory(each, index, tokens, mode))),
      side),
  );
  const show = (token) => side.replaceChildren(...about(found, run, token));
  show(null);
  choose(place, tokens, show, Number(query.token ?? -1));
}

/** Shows a rollout whose text is not recorded: where each of its rows in a step came from. */
async function unrecorded(place, run, id, { policy, step }) {
  const { batch } = await get(`runs/${run.key}/steps/${policy}/${step}`);
  const { rows } = batch;
  const own = rows.rollout_id.map((each, row) => (each === id ? row : -1)).filter((row) => row >= 0);
  const parts = Object.entries(batch.reward_parts);
  place.append(
    h("div.title", {}, h("h1", {}, `Rollout ${short(id)}`), h("span.sub", {}, "not recorded")),
    empty("Its text was not recorded: the hub writes the rollouts of about one group of every batch. This is what is known of every row that is trained on."),
    ...own.map((row) => part(`Row ${row} of step ${step}`, null, h("ol.lineage", {},
      h("li", {}, `reward ${num(rows.reward[row])}`, parts.length ? `: ${parts.map(([name, values]) => `${name} ${num(values[row])}`).join(", ")}` : ""),
      h("li", {}, `sampled by version ${spans(rows.version_spans[row])}`),
      h("li", {}, `on node ${short(batch.members[rows.member[row]])}`),
      h("li", {}, "trained on in ", stepLink(run, { policy, step }), ` with advantage ${signed(rows.advantage[row])}`),
      h("li", {}, "for prompt ", h("code", {}, batch.groups[rows.group[row]].prompt_id))))),
  );
}

/** What is known of each token of a trajectory. */
function tokensOf(trajectory, index, found) {
  if (!trajectory.tokens) return [];
  const versions = trajectory.version_spans.flatMap(([version, length]) => Array(length).fill(version));
  let sampled = 0;
  let turn = 0;
  return trajectory.tokens.map((id, at) => {
    const isSampled = Boolean(trajectory.sampled_mask[at]);
    if (isSampled && !trajectory.sampled_mask[at - 1]) turn += 1;
    const place = isSampled ? sampled++ : null;
    return {
      id, at, trajectory: index, turn, isSampled, text: trajectory.pieces[at],
      version: place === null ? null : versions[place],
      logprob: place === null ? null : (trajectory.logprobs?.[place] ?? null),
      advantage: isSampled ? (trainedOn(found, index)?.advantage ?? null) : null,
    };
  });
}

/** The row that a trajectory was trained on in last; none where no step did. */
function trainedOn(found, trajectory) {
  return found.trained.findLast((row) => row.trajectory === trajectory);
}

function stepLink(run, row) {
  return h("a", { href: link("step", [run.key, row.policy, row.step]) }, `step ${row.step}`);
}

function promptOf(found) {
  return h("details.prompt", { open: true }, h("summary", {}, "Prompt ", h("code", {}, found.prompt_id)),
    h("dl.fields", {}, Object.entries(found.prompt).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value))))));
}

function trajectory(each, index, tokens, mode) {
  const own = tokens.filter((token) => token.trajectory === index);
  const head = h("h2", {}, each.agent || each.policy, h("span.hint", {}, ` ${each.sampled_count} sampled tokens, ended by ${each.finish_reason}`,
    each.reward === null || each.reward === undefined ? "" : `, reward ${num(each.reward)}`));
  if (!each.tokens) return h("section.trajectory", {}, head, empty(each.payload?.fault ?? "Its tokens are not recorded."));
  const blocks = [];
  for (const token of own) {
    const last = blocks.at(-1);
    if (last && last.isSampled === token.isSampled) last.tokens.push(token);
    else blocks.push({ isSampled: token.isSampled, turn: token.turn, tokens: [token] });
  }
  const versions = [...new Set(tokens.map((token) => token.version).filter((version) => version !== null))].sort((a, b) => a - b);
  return h("section.trajectory", {}, head, blocks.map((block) => h(block.isSampled ? "div.turn.sampled" : "div.turn", {},
    h("span.who", {}, block.isSampled ? `turn ${block.turn}` : "given"),
    h("div.tokens", {}, block.tokens.map((token) => piece(token, mode, versions))))));
}

function piece(token, mode, versions) {
  const element = h("span.token", { dataset: { at: token.number }, class: `token ${token.isSampled ? "sampled" : "given"}` }, shown(token.text));
  const tint = tintOf(token, mode, versions);
  if (tint) element.style.setProperty("background-color", tint);
  return element;
}

/** Makes what cannot be seen seen: a line's end, and a token without text. */
function shown(text) {
  if (text === "") return "·";
  return text.replaceAll("\n", "↵\n");
}

function tintOf(token, mode, versions) {
  if (!token.isSampled) return null;
  const mix = (name, share) => `color-mix(in srgb, ${css(name)} ${Math.round(100 * share)}%, transparent)`;
  if (mode === "mask") return mix("--accent", 0.16);
  if (mode === "version") return `color-mix(in srgb, ${colour(versions.indexOf(token.version))} 30%, transparent)`;
  if (mode === "logprob") return token.logprob === null ? null : mix("--warm", 0.75 * Math.min(1, -token.logprob / DEEP));
  if (token.advantage === null) return null;
  const share = 0.12 + 0.5 * Math.min(1, Math.abs(token.advantage));
  return token.advantage === 0 ? mix("--muted", 0.12) : mix(token.advantage > 0 ? "--good" : "--bad", share);
}

function legend(mode, tokens) {
  const sampled = tokens.filter((token) => token.isSampled);
  if (mode === "version") {
    const versions = [...new Set(sampled.map((token) => token.version))].sort((a, b) => a - b);
    return h("span.legend", {}, versions.map((version, at) => [h("i", { style: { background: `color-mix(in srgb, ${colour(at)} 30%, transparent)` } }), `version ${version}`]).flat());
  }
  if (mode === "logprob") {
    const known = sampled.map((token) => token.logprob).filter((each) => each !== null);
    return h("span.legend", {}, h("i.ramp"), known.length ? `likely to unlikely; the lowest is ${signed(extent(known)[0])} nats` : "not recorded");
  }
  if (mode === "advantage") {
    const told = [...new Set(sampled.map((token) => token.advantage).filter((each) => each !== null).map(signed))];
    return h("span.legend", {}, told.length ? `${told.join(" or ")} for every sampled token` : "no step has trained on it");
  }
  return h("span.legend", {}, h("i.sampled"), `${num(sampled.length)} sampled of ${num(tokens.length)} tokens`);
}

/** Lets a token be chosen by a click or the arrow keys. */
function choose(place, tokens, show, first) {
  let chosen = -1;
  const pick = (at) => {
    if (at < 0 || at >= tokens.length) return;
    place.querySelector(".token.chosen")?.classList.remove("chosen");
    chosen = at;
    place.querySelector(`.token[data-at="${at}"]`)?.classList.add("chosen");
    show(tokens[at]);
  };
  for (const area of place.querySelectorAll(".tokens")) {
    area.tabIndex = 0;
    area.setAttribute("aria-label", "Tokens; the arrow keys go through them");
    area.addEventListener("click", (event) => { if (event.target.dataset.at) pick(Number(event.target.dataset.at)); });
    area.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      pick(chosen < 0 ? Number(area.querySelector(".token").dataset.at) : chosen + move);
    });
  }
  pick(first);
}

/** What stands beside the text: where the chosen token, or the rollout, came from. */
function about(found, run, token) {
  const duration = found.start_time && found.finish_time ? (Date.parse(found.finish_time) - Date.parse(found.start_time)) / 1000 : null;
  const rewardParts = Object.entries(found.reward_parts);
  return [
    token ? lineage(found, run, token) : "",
    part("Rollout", null, facts([
      ["reward", num(found.reward)],
      ["advantage", [...new Set(found.trained.map((row) => signed(row.advantage)))].join(", ") || "–"],
      ["trained on in", found.trained.length ? h("span", {}, found.trained.map((row, at) => [at ? "; " : "", found.trajectories.length > 1 ? `${found.trajectories[row.trajectory].agent || row.policy}: ` : "", stepLink(run, row), `, row ${row.row}`]).flat()) : "no step"],
      ["node", h("a", { href: link("timeline", [run.key]) }, short(found.member))],
      ["versions", Object.entries(found.versions).map(([policy, version]) => `${policy} from ${version}`).join(", ") || "–"],
      ["sample", `${found.sample_index + 1} of its group`],
      ["took", seconds(duration)],
      ["accepted", new Date(found.time).toLocaleString()],
    ])),
    rewardParts.length ? part("Reward parts", null, table([{ name: "part", tell: ([name]) => name }, { name: "value", num: true, tell: ([, value]) => num(value) }], rewardParts)) : "",
    Object.keys(found.metrics).length ? part("Metrics", null, facts(Object.entries(found.metrics).map(([name, value]) => [name, num(value)]))) : "",
    found.group.length > 1 ? part("Its group", null, h("ol.siblings", {}, [...found.group].sort((a, b) => a.sample - b.sample).map((each) =>
      h("li", {}, h("a", { href: link("rollout", [run.key, each.id]), "aria-current": each.id === found.rollout_id ? "true" : null },
        h("span", {}, `sample ${each.sample + 1}`), h("span.num", {}, num(each.reward)), h("span.num", {}, each.advantage === null ? "" : signed(each.advantage))))))) : "",
  ];
}

function lineage(found, run, token) {
  const row = trainedOn(found, token.trajectory);
  const text = JSON.stringify(token.text);
  return part("Token", null, h("ol.lineage", {},
    h("li", {}, h("b", {}, text), ` id ${token.id}, number ${token.at} of ${found.trajectories.length > 1 ? `trajectory ${token.trajectory + 1}` : "the row"}`),
    token.isSampled
      ? [h("li", {}, `sampled by version ${token.version}`, token.logprob === null ? "" : ` at ${signed(token.logprob)} nats, ${num(100 * Math.exp(token.logprob), 2)} %`),
        h("li", {}, `on node ${short(found.member)}`),
        row ? h("li", {}, "trained on in ", stepLink(run, row), `, row ${row.row}, with advantage ${signed(row.advantage)}`) : h("li", {}, "trained on in no step")]
      : h("li", {}, "given, not sampled: nothing is trained on it"),
    h("li", {}, "for prompt ", h("code", {}, found.prompt_id), `, pass ${found.epoch + 1} over ${found.data_set}`)));
}

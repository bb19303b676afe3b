// What a step was trained on: its groups side by side, with rewards and what these are made of.

import { get } from "./api.js";
import { choice, empty, facts, h, link, num, part, seconds, short, signed, table } from "./dom.js";

const ORDERS = [["worst", "Lowest reward"], ["best", "Highest"], ["spread", "Most spread"], ["order", "As trained"]];
const MAX_PARTS = 6;

export async function step({ place, run, parts, query }) {
  const policy = parts[0] ?? run.policies[0];
  if (!policy) {
    place.append(empty("No step is done yet."));
    return;
  }
  const number = Number(parts[1] ?? run.last_steps[policy]);
  const found = await get(`runs/${run.key}/steps/${policy}/${number}`);
  const to = (at) => link("step", [run.key, policy, at], query);
  const arrow = (at, text, label) => (at === null ? h("span.arrow", { "aria-disabled": "true" }, text) : h("a.arrow", { href: to(at), "aria-label": label }, text));
  const { metrics, batch } = found;
  place.append(
    h("div.title", {}, arrow(found.before, "←", "Step before"), h("h1", {}, `Step ${number}`), arrow(found.after, "→", "Step after"),
      h("span.sub", {}, `${policy} of ${run.key}, trained on version ${metrics.version}`), h("span.grow"),
      run.policies.length > 1 ? choice("Policy", run.policies.map((each) => [each, each]), policy, (each) => { location.hash = link("step", [run.key, each], query); }) : ""),
    facts([
      ["reward", `${num(metrics["reward/mean"])} ± ${num(metrics["reward/std"])}`],
      ["rollouts", `${num(metrics["batch/rollouts"])} in ${num(metrics["batch/groups"])} groups`],
      ["groups of one reward", metrics["group/zero_std_frac"] === undefined ? "–" : `${num(100 * metrics["group/zero_std_frac"])} %`],
      ["staleness", `${num(metrics["lag/mean"])}, at most ${num(metrics["lag/max"])} versions`],
      ["waited for the batch", seconds(metrics["time/wait_s"])],
      ["trained", seconds(metrics["time/train_s"])],
      ["entropy", num(metrics["train/entropy"])],
      ["gradient norm", num(metrics["train/grad_norm"])],
    ]),
  );
  if (!batch) {
    place.append(empty("What this step was trained on is not in the run's folder: an earlier release wrote it."));
    return;
  }
  const groups = groupsOf(batch);
  const order = query.order ?? "worst";
  const recorded = batch.rows.is_recorded.filter(Boolean).length;
  place.append(
    part("Groups", `A bar is a rollout, as high as its reward. Filled bars are recorded and open their text, the others what is known of them: ${recorded} of ${batch.rows.reward.length} here, their groups first.`,
      h("div.bar", {}, choice("Order of the groups", ORDERS, order, (value) => { location.hash = link("step", [run.key, policy, number], { ...query, order: value }); }),
        h("span.grow"), recorded ? null : nearby(found, to)),
      h("div.groups", {}, sorted(groups, order, batch.rows.is_recorded).map((group) => card(group, groups, batch, run)))),
    part("Rows of the batch", "In the order of their rewards; the advantage is that of every trained token.", rowTable(groups, batch, run)),
  );
}

function nearby(found, to) {
  const links = found.recorded.filter((each) => each !== null).map((each) => h("a", { href: to(each) }, `step ${each}`));
  return links.length ? h("span.hint", {}, "Nearest with recorded rollouts: ", links.flatMap((each, at) => (at ? [", ", each] : [each]))) : null;
}

function groupsOf({ groups, rows }) {
  const made = groups.map((group) => ({ ...group, rows: [] }));
  rows.group.forEach((group, row) => made[group].rows.push(row));
  for (const group of made) {
    const rewards = group.rows.map((row) => rows.reward[row]).filter((each) => each !== null);
    group.mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    group.std = rewards.length ? Math.sqrt(rewards.reduce((sum, each) => sum + (each - group.mean) ** 2, 0) / rewards.length) : null;
  }
  return made;
}

function sorted(groups, order, recorded) {
  const isRecorded = (g) => g.rows.some((row) => recorded[row]);
  const by = { worst: (g) => g.mean, best: (g) => -g.mean, spread: (g) => -g.std }[order];
  return by ? [...groups].sort((a, b) => isRecorded(b) - isRecorded(a) || by(a) - by(b)) : groups;
}

function card(group, groups, batch, run) {
  const rewards = batch.rows.reward.filter((each) => each !== null);
  const low = Math.min(0, ...rewards);
  const high = Math.max(...rewards, low + 1e-9);
  const bars = group.rows.map((row) => {
    const reward = batch.rows.reward[row];
    const told = `sample ${group.rows.indexOf(row) + 1}: reward ${num(reward)}, advantage ${signed(batch.rows.advantage[row])}`;
    const fill = h("i", { style: { bottom: `${(100 * (Math.min(0, reward ?? 0) - low)) / (high - low)}%`, height: `${Math.max(3, (100 * Math.abs(reward ?? 0)) / (high - low))}%` } });
    const isRecorded = batch.rows.is_recorded[row];
    const said = isRecorded ? told : `${told} (text not recorded)`;
    return h(isRecorded ? "a.rollout-bar" : "a.rollout-bar.faint", { href: rolloutLink(run, batch, row), title: said, "aria-label": said }, fill);
  });
  const means = Object.entries(batch.reward_parts).map(([name, values]) => [name, mean(group.rows.map((row) => values[row]))]);
  const told = means.filter(([, value]) => value).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, MAX_PARTS);
  return h("article.group", {},
    h("header", {}, h("code", { title: group.prompt_id }, group.prompt_id), h("b", {}, num(group.mean)), h("span.hint", {}, group.std ? `± ${num(group.std, 2)}` : "all alike")),
    h("div.bars", {}, bars),
    h("ul.parts", {}, told.map(([name, value]) => h("li", {}, h("span", {}, name), h("span", {}, num(value))))));
}

/** Leads to a rollout; of one whose text is not recorded, to what its step knows of it. */
function rolloutLink(run, { policy, step, rows }, row) {
  return link("rollout", [run.key, rows.rollout_id[row]], rows.is_recorded[row] ? {} : { policy, step });
}

function mean(values) {
  const known = values.filter((each) => each !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function rowTable(groups, batch, run) {
  const { rows } = batch;
  const order = rows.reward.map((_, row) => row).sort((a, b) => (rows.reward[a] ?? 0) - (rows.reward[b] ?? 0));
  const name = (row) => {
    const text = short(rows.rollout_id[row]);
    return h(rows.is_recorded[row] ? "a" : "a.hint", { href: rolloutLink(run, batch, row), title: rows.is_recorded[row] ? null : "text not recorded" }, text);
  };
  const partNames = Object.keys(batch.reward_parts).slice(0, MAX_PARTS);
  return table([
    { name: "row", num: true, tell: (row) => row },
    { name: "rollout", tell: name },
    { name: "prompt", tell: (row) => groups[rows.group[row]].prompt_id },
    { name: "reward", num: true, tell: (row) => num(rows.reward[row]) },
    { name: "advantage", num: true, tell: (row) => signed(rows.advantage[row]) },
    ...partNames.map((each) => ({ name: each, num: true, tell: (row) => num(batch.reward_parts[each][row]) })),
    { name: "versions", num: true, tell: (row) => spans(rows.version_spans[row]) },
    { name: "node", tell: (row) => short(batch.members[rows.member[row]]) },
  ], order);
}

export function spans(list) {
  const versions = list.map(([version]) => version);
  const [low, high] = [Math.min(...versions), Math.max(...versions)];
  return low === high ? String(low) : `${low}–${high}`;
}

// The books of a run: where every sample is, and why samples were dropped.

import { get } from "./api.js";
import { colour, css, empty, facts, h, link, num, part, percent, table } from "./dom.js";
import { plot } from "./plot.js";

const PLACES = [["trained", "--accent"], ["in_flight", "--series-1"], ["waiting", "--series-4"], ["fresh", "--series-5"], ["leased", "--series-6"]];
const DROPPED = "buffer/dropped/";

export async function books({ place, run }) {
  const status = await get(`runs/${run.key}/status`);
  place.append(h("h1", {}, "Books"));
  if (!status.books?.length) {
    place.append(empty("The hub left no books here: it was killed before its end. `astraflow ledger` reads them from the journal."));
    return;
  }
  for (const account of status.books) place.append(accountPart(account));
  const reasons = status.books.flatMap((account) => account.drops.map((drop) => ({ ...drop, account })));
  const metrics = run.metrics.filter((name) => name.startsWith(DROPPED));
  const figure = h("figure.plot", { "aria-label": "Dropped samples over the steps" });
  place.append(part("Why samples were dropped", "In samples, over the whole run.",
    reasons.length ? table([
      { name: "policy", tell: (row) => row.account.policy_id },
      { name: "reason", tell: (row) => (row.filter ? `${row.reason} by ${row.filter}` : row.reason) },
      { name: "samples", num: true, tell: (row) => num(row.count) },
      { name: "of those issued", num: true, tell: (row) => percent(row.count / Math.max(1, row.account.issued_count)) },
    ], reasons.sort((a, b) => b.count - a.count)) : empty("None was dropped."),
    metrics.length ? figure : ""));
  place.append(failures(status.failures, run));
  if (status.dead_letter_count) place.append(part("Given up", null, facts([["prompts that are issued no more", num(status.dead_letter_count)]])));
  if (!metrics.length) return;
  const curves = await Promise.all(metrics.map((name) => get(`runs/${run.key}/curves/${name}`)));
  let dispose = null;
  place.addEventListener("shown", () => {
    dispose = plot(figure, {
      height: 220, xLabel: "step", tellX: num, tellY: num,
      curves: curves.flatMap((policies, at) => Object.entries(policies).map(([policy, columns], n) => ({
        name: `${metrics[at].slice(DROPPED.length)}${Object.keys(policies).length > 1 ? ` ${policy}` : ""}`, colour: colour(at + n), x: columns.step, y: columns.value,
        open: (index) => { location.hash = link("step", [run.key, policy, columns.step[index]]); },
      }))),
    });
  }, { once: true });
  return () => dispose?.();
}

function accountPart(account) {
  const dropped = account.drops.reduce((sum, drop) => sum + drop.count, 0);
  const shares = [...PLACES.map(([name, tint]) => [name.replace("_", " "), account[`${name}_count`], tint]), ["dropped", dropped, "--bad"]].filter(([, count]) => count);
  const total = Math.max(1, account.issued_count);
  return part(account.policy_id, `issued ${num(account.issued_count)} = ${shares.map(([name, count]) => `${num(count)} ${name}`).join(" + ")}; the books ${account.balanced ? "add up" : "DO NOT add up"}`,
    h("div.stack", {}, shares.map(([name, count, tint]) => h("i", { title: `${name}: ${num(count)}`, style: { width: `${(100 * count) / total}%`, background: css(tint) } }))),
    h("div.legend", {}, shares.flatMap(([name, count, tint]) => [h("i", { style: { background: css(tint) } }), `${name} ${percent(count / total)}`])),
    facts([["issued again", num(account.reissued_count)], ["duplicates", num(account.duplicate_count)], ["rolled back", num(account.rolled_back_count)], ["replayed", num(account.replayed_count)]]));
}

function failures(report, run) {
  const causes = report?.causes ?? [];
  const told = report ? `${num(report.failed_count ?? 0)} of ${num(report.finished_count ?? 0)} rollouts failed.` : null;
  return part("Failures", told, causes.length ? table([
    { name: "seen", num: true, tell: (row) => `${num(row.count)} times` },
    { name: "reason", tell: (row) => row.reason ?? row.last?.reason },
    { name: "cause", tell: (row) => row.cause },
    { name: "last message", tell: (row) => row.message ?? row.last?.message },
  ], causes) : empty("No rollout failed."),
  h("p.hint", {}, h("a", { href: link("rollouts", [run.key], { sort: "reward" }) }, "The recorded rollouts, lowest rewards first")));
}

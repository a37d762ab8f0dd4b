// compare: one task under two teams, side by side; without a task, those tasks that several teams have played.

import { get } from "./api.js";
import { chip, h, link, notice, number, seconds, select, signed, table, versions } from "./dom.js";
import { outcomeOf, viewerOf } from "./trace.js";

export async function compare(team, task, params, status, signal) {
  const asked = { store: params.get("store") || "", purpose: params.get("purpose") || "" };
  return task ? sideBySide(team, task, asked, params, signal) : listTasks(team, asked, signal);
}

async function listTasks(team, asked, signal) {
  const purpose = asked.purpose || "gate";
  const found = await get(["teams", team, "traces"], { store: asked.store, purpose, limit: 200 }, signal);
  const tasks = new Map();
  for (const row of found.data) {
    const of = tasks.get(row.task_id) || { prompt: row.task_prompt, teams: new Map() };
    of.teams.set(row.team_key, [...(of.teams.get(row.team_key) || []), row]);
    tasks.set(row.task_id, of);
  }
  const shared = [...tasks].filter(([, of]) => of.teams.size > 1);
  const rows = shared.map(([id, of]) => {
    const [a, b] = [...of.teams.values()];
    const delta = mean(a) === null || mean(b) === null ? null : mean(a) - mean(b);
    return h("tr", {}, h("td", {}, h("a", { href: link(["compare", team, id], { ...asked, purpose }) }, id)), h("td", { class: "text" }, of.prompt),
      [a, b].map((rowsOf) => h("td", { class: "num" }, number(mean(rowsOf)), h("span", { class: "quiet" }, ` ${versions(rowsOf[0].policy_versions)} (${rowsOf.length})`))),
      h("td", { class: `num ${delta > 0 ? "good" : delta < 0 ? "bad" : ""}` }, delta === null ? "–" : signed(delta)));
  });
  const go = (v) => { location.hash = link(["compare", team], { ...asked, purpose: v }); };
  const bar = h("div", { class: "bar" }, h("h1", {}, "Tasks that two teams have played ", h("span", { class: "quiet" }, team)),
    select("Purpose", purpose, ["gate", "test", "train"].map((p) => [p, p]), go));
  const body = rows.length ? table(["Task", "Prompt", ">Newer team", ">Older team", ">Difference"], rows, { class: "list" })
    : notice("", `None among the newest ${found.data.length} ${purpose} episodes`, h("p", {}, "The gate plays each of its tasks with candidate and champion: run the evaluate stage, or open a task from the list of ",
      h("a", { href: link(["traces", team]) }, "traces"), "."));
  return { node: h("div", {}, bar, body), title: `Compare ${team}` };
}

async function sideBySide(team, task, asked, params, signal) {
  const found = await get(["teams", team, "tasks", task], asked, signal);
  const place = (name, other) => found.teams.find((t) => t.team_key === params.get(name)) || other;
  const left = place("left", found.teams[0]);
  const right = place("right", found.teams.find((t) => t !== left));
  const go = (change) => {
    const chosen = { left: left.team_key, right: right?.team_key, leftTrace: params.get("leftTrace"), rightTrace: params.get("rightTrace") };
    location.hash = link(["compare", team, task], { ...asked, ...chosen, ...change });
  };
  const sides = await Promise.all([["left", left], ["right", right]].map(([name, of]) => (of ? sideOf(team, name, of, found.teams, asked, params, go, signal) : null)));
  const only = notice("", "Only one team has played this task", h("p", {}, "Take another purpose, or a task of the gate, which candidate and champion both play."));
  const first = left.episodes[0];
  const node = h("div", {}, h("div", { class: "bar" }, h("h1", {}, h("a", { class: "quiet", href: link(["compare", team], asked) }, "Compare"), " ", h("code", {}, task)),
    h("span", { class: "quiet" }, found.purpose || "any purpose"), verdict(left, right)),
  h("pre", { class: "said" }, first.task_prompt), first.task_answers.length ? h("p", { class: "small quiet" }, "Right would be ", first.task_answers.map((a) => [h("code", {}, a), " "])) : null,
  h("div", { class: "sides" }, sides[0].node, sides[1]?.node || only));
  return { node, title: `Compare ${task}`, leave: () => sides.forEach((side) => side?.leave()) };
}

async function sideOf(team, name, of, teams, asked, params, go, signal) {
  const wanted = params.get(`${name}Trace`);
  const row = of.episodes.find((e) => e.episode_id === wanted) || of.episodes[0];
  const trace = await get(["teams", team, "traces", row.episode_id], { store: asked.store }, signal);
  const viewer = viewerOf(trace, { chosen: null, keep: () => {} });
  const picks = of.episodes.map((e) => h("button", {
    type: "button", class: `pick ${outcome(e) === null ? "" : outcome(e) > 0.5 ? "good" : "bad"}`, "aria-pressed": e === row, title: `${e.episode_id} ${e.status}`,
    on: { click: () => go({ [`${name}Trace`]: e.episode_id }) },
  }, number(outcome(e))));
  const node = h("section", { class: "side" },
    h("header", { class: "row" }, teams.length > 2 ? select("", of.team_key, teams.map((t) => [t.team_key, `${t.arm || "team"} ${versions(t.policy_versions)}`]), (v) => go({ [name]: v, [`${name}Trace`]: "" }))
      : h("h2", {}, versions(of.policy_versions)), of.arm ? chip(of.arm, of.arm) : chip(of.team_key.slice(0, 8))),
    h("p", { class: "small" }, figures(of)),
    h("div", { class: "picks" }, h("span", { class: "quiet small" }, "Episodes by outcome"), picks,
      h("a", { class: "small", href: link(["traces", team, row.episode_id], { store: asked.store }) }, "open this one")),
    outcomeOf(trace), viewer.node);
  return { node, leave: viewer.leave };
}

function outcome(row) {
  const known = Object.values(row.outcomes);
  return known.length ? known.at(-1) : null;
}

function mean(rows) {
  const known = rows.map(outcome).filter((v) => v !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function average(rows, name) {
  return rows.reduce((sum, row) => sum + row[name], 0) / rows.length;
}

function figures(of) {
  const rows = of.episodes;
  return `${rows.length} episode${rows.length === 1 ? "" : "s"}, mean outcome ${number(mean(rows))}, ${number(average(rows, "num_turns"))} turns, ${seconds(average(rows, "duration_s"))}`;
}

function verdict(left, right) {
  if (!right || mean(left.episodes) === null || mean(right.episodes) === null) return null;
  const delta = mean(left.episodes) - mean(right.episodes);
  return chip(`left − right ${signed(delta)}`, delta > 0 ? "good" : delta < 0 ? "bad" : "");
}

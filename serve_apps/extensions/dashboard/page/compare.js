// compare: one task under two teams, side by side; without a task, the tasks that several teams have run.

import { get } from "./api.js";
import { chip, h, link, notice, number, seconds, select, signed, table, versions } from "./dom.js";
import { outcomeOf, viewerOf } from "./trace.js";

export async function compare(team, task, params, status, signal) {
  const query = { store: params.get("store") || "", purpose: params.get("purpose") || "" };
  return task ? sideBySide(team, task, query, params, signal) : listTasks(team, query, signal);
}

async function listTasks(team, query, signal) {
  const purpose = query.purpose || "gate";
  const answer = await get(["teams", team, "traces"], { store: query.store, purpose, limit: 200 }, signal);
  const tasks = new Map();
  for (const row of answer.data) {
    const entry = tasks.get(row.task_id) || { prompt: row.task_prompt, teams: new Map() };
    entry.teams.set(row.team_key, [...(entry.teams.get(row.team_key) || []), row]);
    tasks.set(row.task_id, entry);
  }
  const shared = [...tasks].filter(([, entry]) => entry.teams.size > 1);
  const rows = shared.map(([id, entry]) => {
    const [a, b] = [...entry.teams.values()];
    const delta = mean(a) === null || mean(b) === null ? null : mean(a) - mean(b);
    return h("tr", {}, h("td", {}, h("a", { href: link(["compare", team, id], { ...query, purpose }) }, id)), h("td", { class: "text" }, entry.prompt),
      [a, b].map((rowsOf) => h("td", { class: "num" }, number(mean(rowsOf)), h("span", { class: "quiet" }, ` ${versions(rowsOf[0].policy_versions)} (${rowsOf.length})`))),
      h("td", { class: `num ${delta > 0 ? "good" : delta < 0 ? "bad" : ""}` }, delta === null ? "–" : signed(delta)));
  });
  const go = (v) => { location.hash = link(["compare", team], { ...query, purpose: v }); };
  const bar = h("div", { class: "bar" }, h("h1", {}, "Tasks that two teams have run ", h("span", { class: "quiet" }, team)),
    select("Purpose", purpose, ["gate", "test", "train"].map((p) => [p, p]), go));
  const body = rows.length ? table(["Task", "Prompt", ">Newer team", ">Older team", ">Difference"], rows, { class: "list" })
    : notice("", `No shared task among the newest ${answer.data.length} ${purpose} episodes`, h("p", {}, "The gate runs each of its tasks with candidate and champion. Run the evaluate stage, or open a task from the list of ",
      h("a", { href: link(["traces", team]) }, "traces"), "."));
  return { node: h("div", {}, bar, body), title: `Compare ${team}` };
}

async function sideBySide(team, task, query, params, signal) {
  const answer = await get(["teams", team, "tasks", task], query, signal);
  const chosenTeam = (name, other) => answer.teams.find((t) => t.team_key === params.get(name)) || other;
  const left = chosenTeam("left", answer.teams[0]);
  const right = chosenTeam("right", answer.teams.find((t) => t !== left));
  const go = (change) => {
    const chosen = { left: left.team_key, right: right?.team_key, leftTrace: params.get("leftTrace"), rightTrace: params.get("rightTrace") };
    location.hash = link(["compare", team, task], { ...query, ...chosen, ...change });
  };
  const sides = await Promise.all([["left", left], ["right", right]].map(([name, version]) => (version ? sideOf(team, name, version, answer.teams, query, params, go, signal) : null)));
  const only = notice("", "Only one team has run this task", h("p", {}, "Choose another purpose, or a task of the gate, which candidate and champion both run."));
  const first = left.episodes[0];
  const node = h("div", {}, h("div", { class: "bar" }, h("h1", {}, h("a", { class: "quiet", href: link(["compare", team], query) }, "Compare"), " ", h("code", {}, task)),
    h("span", { class: "quiet" }, answer.purpose || "any purpose"), verdict(left, right)),
  h("pre", { class: "quoted" }, first.task_prompt), first.task_answers.length ? h("p", { class: "small quiet" }, "Reference answer: ", first.task_answers.map((a) => [h("code", {}, a), " "])) : null,
  h("div", { class: "sides" }, sides[0].node, sides[1]?.node || only));
  return { node, title: `Compare ${task}`, leave: () => sides.forEach((side) => side?.leave()) };
}

async function sideOf(team, name, version, teams, query, params, go, signal) {
  const chosenId = params.get(`${name}Trace`);
  const row = version.episodes.find((e) => e.episode_id === chosenId) || version.episodes[0];
  const trace = await get(["teams", team, "traces", row.episode_id], { store: query.store }, signal);
  const viewer = viewerOf(trace, { chosen: null, onChoose: () => {} });
  const picks = version.episodes.map((e) => h("button", {
    type: "button", class: `pick ${outcome(e) === null ? "" : outcome(e) > 0.5 ? "good" : "bad"}`, "aria-pressed": e === row, title: `${e.episode_id} ${e.status}`,
    on: { click: () => go({ [`${name}Trace`]: e.episode_id }) },
  }, number(outcome(e))));
  const node = h("section", { class: "side" },
    h("header", { class: "row" }, teams.length > 2 ? select("", version.team_key, teams.map((t) => [t.team_key, `${t.alias || "team"} ${versions(t.policy_versions)}`]), (v) => go({ [name]: v, [`${name}Trace`]: "" }))
      : h("h2", {}, versions(version.policy_versions)), version.alias ? chip(version.alias, version.alias) : chip(version.team_key.slice(0, 8))),
    h("p", { class: "small" }, figures(version)),
    h("div", { class: "picks" }, h("span", { class: "quiet small" }, "Episodes by outcome"), picks,
      h("a", { class: "small", href: link(["traces", team, row.episode_id], { store: query.store }) }, "open this episode")),
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

function figures(version) {
  const rows = version.episodes;
  return `${rows.length} episode${rows.length === 1 ? "" : "s"}, mean outcome ${number(mean(rows))}, ${number(average(rows, "num_turns"))} turns, ${seconds(average(rows, "duration_s"))}`;
}

function verdict(left, right) {
  if (!right || mean(left.episodes) === null || mean(right.episodes) === null) return null;
  const delta = mean(left.episodes) - mean(right.episodes);
  return chip(`left − right ${signed(delta)}`, delta > 0 ? "good" : delta < 0 ? "bad" : "");
}

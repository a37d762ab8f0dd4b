// overview: GET status -> the deployed versions of each team, their shares of the traffic and their metrics, refreshed in place.

import { chip, h, link, notice, number, percent, seconds, signed, table } from "./dom.js";
import { remember, series, spark } from "./history.js";

/** [name, label, format, direction that is worse: +1 higher, -1 lower, 0 neither] */
const FIGURES = [
  ["failure_share", "failures", percent, 1],
  ["latency_s", "time per answer", seconds, 1],
  ["completion_tokens", "tokens per answer", number, 0],
  ["cut_share", "truncated answers", percent, 1],
  ["empty_share", "empty answers", percent, 1],
  ["format_share", "turns with valid format", percent, -1],
];

export function overview(status) {
  const node = h("div", { class: "overview" });
  const update = (next) => {
    remember(next);
    const open = [...node.querySelectorAll("details[open]")].map((d) => d.dataset.team);
    node.replaceChildren(...draw(next));
    for (const d of node.querySelectorAll("details")) d.open = open.includes(d.dataset.team);
  };
  update(status);
  return { node, update, title: "Overview" };
}

export function noTeam() {
  const command = h("code", {}, "troupe serve TEAM@champion");
  return notice("", "No team is deployed", h("p", {}, "Promote a team, then deploy it: ", command));
}

function draw(status) {
  const fault = status.keys_fault
    ? [notice("bad", "The latest change of the key file was rejected", h("p", {}, status.keys_fault))]
    : [];
  const teams = status.teams.length ? status.teams.map((team) => card(team)) : [noTeam()];
  return [...fault, strip(status), ...teams];
}

function strip(status) {
  const rate = series("rate", "");
  const busy = series("in_flight", "");
  return h("section", { class: "strip", "aria-label": "This gateway" },
    gauge("In flight", number(status.in_flight), `of ${number(status.max_in_flight)}`, busy),
    gauge("Waiting", number(status.waiting), `of ${number(status.max_queued)}`, series("waiting", "")),
    gauge("Answers per second", rate.length ? number(rate.at(-1), 2) : "–", "", rate),
    gauge("Teams", number(status.teams.length), status.has_keys ? "API keys required" : "no API keys: open to this machine"),
    gauge("Episodes", number(status.episodes), "open, of external programs"),
    gauge("Replicas", number(status.replicas.length), status.replicas.length < status.num_replicas
      ? `of ${status.num_replicas}; metrics of those that respond` : "metrics cover all"));
}

function gauge(label, value, more, points = null) {
  return h("div", { class: "gauge" }, h("div", { class: "label" }, label),
    h("div", { class: "row" }, h("span", { class: "value" }, value), points ? spark(points) : null),
    h("div", { class: "quiet small" }, more));
}

function card(team) {
  const byAlias = Object.fromEntries(team.deployed.map((deployed) => [deployed.alias, deployed]));
  return h("section", { class: "card" },
    h("header", { class: "row" }, h("h2", {}, team.name),
      team.run_id ? h("span", { class: "quiet" }, "run ", h("code", {}, team.run_id)) : null,
      h("span", { class: "quiet" }, byAlias.champion.workflow.split(":").at(-1)), h("span", { class: "grow" }),
      h("a", { href: link(["traces", team.name]) }, "Traces"), h("a", { href: link(["compare", team.name]) }, "Compare")),
    split(team, byAlias), h("div", { class: "columns" }, figuresOf(team, byAlias), groupsOf(team)),
    h("details", { "data-team": team.name }, h("summary", {}, `${team.models.length} model names`),
      h("ul", { class: "plain" }, team.models.map((name) => h("li", {}, h("code", {}, name))))));
}

function split(team, byAlias) {
  const part = (alias, share, text) => share > 0
    ? h("div", { class: `part ${alias}`, "data-share": share, title: text }, share >= 0.08 ? text : "") : null;
  const bar = h("div", { class: "split", role: "img", "aria-label": "Traffic split" },
    part("champion", 1 - team.share, `champion ${percent(1 - team.share)}`),
    part("candidate", team.share, `candidate ${percent(team.share)}`));
  for (const segment of bar.children) segment.style.flexGrow = segment.dataset.share;
  const shadow = team.shadow
    ? h("div", { class: "shadow" }, h("div", { class: "fill" })) : null;
  if (shadow) {
    shadow.style.width = `${(1 - team.share) * 100}%`;
    shadow.firstChild.style.width = `${team.shadow * 100}%`;
  }
  const candidate = byAlias.candidate
    ? h("span", {}, h("i", { class: "dot candidate" }), `candidate v${byAlias.candidate.team_version} on ${byAlias.candidate.set_name}, `
      + `${percent(team.share)} of requests`, team.shadow ? `, shadow traffic ${percent(team.shadow)} of the champion's` : "")
    : h("span", { class: "quiet" }, "no candidate deployed");
  return h("div", {}, bar, shadow, h("div", { class: "legend" },
    h("span", {}, h("i", { class: "dot champion" }), `champion v${byAlias.champion.team_version} on ${byAlias.champion.set_name}, ${percent(1 - team.share)}`),
    candidate,
    byAlias.previous ? h("span", {}, h("i", { class: "dot previous" }), `v${byAlias.previous.team_version} still loaded on ${byAlias.previous.set_name}, for rollback`) : null));
}

function figuresOf(team, byAlias) {
  const columns = [...team.deployed, ...team.gone.map((g) => ({ alias: "removed", in_flight: null, ...g }))];
  const head = [h("td"), ...columns.map((column) => h("th", { scope: "col", class: "num" },
    h("i", { class: `dot ${column.alias}` }), `${column.alias} v${column.team_version}`)), byAlias.candidate ? h("th", { class: "num" }, "candidate − champion") : null];
  const line = (label, cells, delta = null) => h("tr", {}, h("th", { scope: "row" }, label), cells.map((c) => h("td", { class: "num" }, c)),
    byAlias.candidate ? delta || h("td") : null);
  const rows = [
    line("answers", columns.map((column) => h("span", { class: "withspark" }, spark(series("answers", `${team.name}/${column.team_version}`)),
      number(column.figures.failure_share?.num || 0)))),
    line("in flight", columns.map((column) => (column.in_flight === null ? "–" : number(column.in_flight)))),
    ...FIGURES.map(([name, label, format, worse]) => line(label, columns.map((column) => format(column.figures[name]?.mean)),
      byAlias.candidate ? difference(byAlias.candidate.figures[name], byAlias.champion.figures[name], format, worse) : null)),
  ];
  return h("div", {}, h("h3", {}, "Live metrics of all replicas, since each started"), table(head.filter(Boolean), rows, { class: "figures" }));
}

/** The difference with its 95% confidence interval, coloured if the interval excludes zero. */
function difference(a, b, format, worse) {
  if (!a || !b) return h("td", { class: "num quiet" }, "–");
  const delta = a.mean - b.mean;
  if (a.standard_error === undefined || b.standard_error === undefined) return h("td", { class: "num quiet" }, "too few");
  const half = 1.96 * Math.hypot(a.standard_error, b.standard_error);
  const isClear = Math.abs(delta) > half && worse !== 0;
  const kind = !isClear ? "" : Math.sign(delta) === worse ? "bad" : "good";
  const text = delta < 0 ? `−${format(-delta)}` : delta > 0 ? `+${format(delta)}` : format(0);
  return h("td", { class: `num ${kind}`, title: "95% confidence interval; coloured if it excludes zero" }, text, h("span", { class: "quiet" }, ` ± ${format(half)}`));
}

function groupsOf(team) {
  const groups = [...new Set(team.deployed.flatMap((column) => Object.keys(column.policy_versions)))].sort();
  const champion = team.deployed[0];
  const rows = groups.map((group) => h("tr", {}, h("th", { scope: "row" }, group),
    h("td", { class: "agents" }, Object.entries(champion.group_of).filter(([, g]) => g === group).map(([agent]) => chip(agent))),
    team.deployed.map((deployed) => {
      const version = deployed.policy_versions[group];
      const step = version - champion.policy_versions[group];
      return h("td", { class: "num" }, version === undefined ? "–" : `v${version}`,
        deployed !== champion && step ? h("span", { class: "changed" }, ` ${signed(step)}`) : null);
    })));
  const head = ["Model group", "Agents", ...team.deployed.map(({ alias }) => h("th", { class: "num" }, h("i", { class: `dot ${alias}` }), alias))];
  return h("div", {}, h("h3", {}, "Versions"), table(head, rows));
}

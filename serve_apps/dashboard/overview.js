// overview: GET status -> who answers, with what share, and how it goes, refreshed in place.

import { chip, h, link, notice, number, percent, seconds, signed, table } from "./dom.js";
import { remember, series, spark } from "./history.js";

/** [name, label, format, which way is worse: +1 higher, -1 lower, 0 neither] */
const FIGURES = [
  ["failure_share", "failures", percent, 1],
  ["seconds", "time per answer", seconds, 1],
  ["completion_tokens", "tokens per answer", number, 0],
  ["cut_share", "cut short", percent, 1],
  ["empty_share", "empty answers", percent, 1],
  ["format_share", "well-formed turns", percent, -1],
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
  return notice("", "No team is in service", h("p", {}, "Promote one, then put it into service: ", command));
}

function draw(status) {
  const fault = status.keys_fault
    ? [notice("bad", "The last change of the key file is not in force", h("p", {}, status.keys_fault))]
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
    gauge("Teams", number(status.teams.length), status.has_keys ? "keys asked for" : "no keys: open to this machine"),
    gauge("Episodes", number(status.episodes), "of programs, open"),
    gauge("Replicas", number(status.replicas.length), status.replicas.length < status.num_replicas
      ? `of ${status.num_replicas}; figures of those that answer` : "figures are of all"));
}

function gauge(label, value, more, points = null) {
  return h("div", { class: "gauge" }, h("div", { class: "label" }, label),
    h("div", { class: "row" }, h("span", { class: "value" }, value), points ? spark(points) : null),
    h("div", { class: "quiet small" }, more));
}

function card(team) {
  const by = Object.fromEntries(team.arms.map((arm) => [arm.arm, arm]));
  return h("section", { class: "card" },
    h("header", { class: "row" }, h("h2", {}, team.name),
      team.run_id ? h("span", { class: "quiet" }, "run ", h("code", {}, team.run_id)) : null,
      h("span", { class: "quiet" }, by.champion.workflow.split(":").at(-1)), h("span", { class: "grow" }),
      h("a", { href: link(["traces", team.name]) }, "Traces"), h("a", { href: link(["compare", team.name]) }, "Compare")),
    split(team, by), h("div", { class: "columns" }, figuresOf(team, by), groupsOf(team)),
    h("details", { "data-team": team.name }, h("summary", {}, `${team.models.length} models to call`),
      h("ul", { class: "plain" }, team.models.map((name) => h("li", {}, h("code", {}, name))))));
}

function split(team, by) {
  const part = (arm, share, text) => share > 0
    ? h("div", { class: `part ${arm}`, "data-share": share, title: text }, share >= 0.08 ? text : "") : null;
  const bar = h("div", { class: "split", role: "img", "aria-label": "Who answers" },
    part("champion", 1 - team.share, `champion ${percent(1 - team.share)}`),
    part("candidate", team.share, `candidate ${percent(team.share)}`));
  for (const of of bar.children) of.style.flexGrow = of.dataset.share;
  const shadow = team.shadow
    ? h("div", { class: "shadow" }, h("div", { class: "fill" })) : null;
  if (shadow) {
    shadow.style.width = `${(1 - team.share) * 100}%`;
    shadow.firstChild.style.width = `${team.shadow * 100}%`;
  }
  const candidate = by.candidate
    ? h("span", {}, h("i", { class: "dot candidate" }), `candidate v${by.candidate.team_version} on ${by.candidate.set_name}, `
      + `${percent(team.share)} of requests`, team.shadow ? `, shadows ${percent(team.shadow)} of the champion's` : "")
    : h("span", { class: "quiet" }, "no candidate beside it");
  return h("div", {}, bar, shadow, h("div", { class: "legend" },
    h("span", {}, h("i", { class: "dot champion" }), `champion v${by.champion.team_version} on ${by.champion.set_name}, ${percent(1 - team.share)}`),
    candidate,
    by.previous ? h("span", {}, h("i", { class: "dot previous" }), `v${by.previous.team_version} still loaded on ${by.previous.set_name}: the way back`) : null));
}

function figuresOf(team, by) {
  const columns = [...team.arms, ...team.gone.map((g) => ({ arm: "gone", in_flight: null, ...g }))];
  const head = [h("td"), ...columns.map((arm) => h("th", { scope: "col", class: "num" },
    h("i", { class: `dot ${arm.arm}` }), `${arm.arm} v${arm.team_version}`)), by.candidate ? h("th", { class: "num" }, "candidate − champion") : null];
  const line = (label, cells, delta = null) => h("tr", {}, h("th", { scope: "row" }, label), cells.map((c) => h("td", { class: "num" }, c)),
    by.candidate ? delta || h("td") : null);
  const rows = [
    line("answers", columns.map((arm) => h("span", { class: "withspark" }, spark(series("answers", `${team.name}/${arm.team_version}`)),
      number(arm.figures.failure_share?.num || 0)))),
    line("in flight", columns.map((arm) => (arm.in_flight === null ? "–" : number(arm.in_flight)))),
    ...FIGURES.map(([name, label, format, worse]) => line(label, columns.map((arm) => format(arm.figures[name]?.mean)),
      by.candidate ? difference(by.candidate.figures[name], by.champion.figures[name], format, worse) : null)),
  ];
  return h("div", {}, h("h3", {}, "Live figures of all replicas, each since it started"), table(head.filter(Boolean), rows, { class: "figures" }));
}

/** The difference with its 95% interval; coloured where the interval leaves zero out. */
function difference(a, b, format, worse) {
  if (!a || !b) return h("td", { class: "num quiet" }, "–");
  const delta = a.mean - b.mean;
  if (a.standard_error === undefined || b.standard_error === undefined) return h("td", { class: "num quiet" }, "too few");
  const half = 1.96 * Math.hypot(a.standard_error, b.standard_error);
  const isClear = Math.abs(delta) > half && worse !== 0;
  const kind = !isClear ? "" : Math.sign(delta) === worse ? "bad" : "good";
  const text = delta < 0 ? `−${format(-delta)}` : delta > 0 ? `+${format(delta)}` : format(0);
  return h("td", { class: `num ${kind}`, title: "95% interval; coloured where it leaves zero out" }, text, h("span", { class: "quiet" }, ` ± ${format(half)}`));
}

function groupsOf(team) {
  const groups = [...new Set(team.arms.flatMap((arm) => Object.keys(arm.policy_versions)))].sort();
  const champion = team.arms[0];
  const rows = groups.map((group) => h("tr", {}, h("th", { scope: "row" }, group),
    h("td", { class: "agents" }, Object.entries(champion.group_of).filter(([, g]) => g === group).map(([agent]) => chip(agent))),
    team.arms.map((arm) => {
      const version = arm.policy_versions[group];
      const step = version - champion.policy_versions[group];
      return h("td", { class: "num" }, version === undefined ? "–" : `v${version}`,
        arm !== champion && step ? h("span", { class: "changed" }, ` ${signed(step)}`) : null);
    })));
  const head = ["Model group", "Agents", ...team.arms.map((arm) => h("th", { class: "num" }, h("i", { class: `dot ${arm.arm}` }), arm.arm))];
  return h("div", {}, h("h3", {}, "Versions"), table(head, rows));
}

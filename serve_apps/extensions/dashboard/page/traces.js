// traces: the stored episodes of a team, newest first, with filters in the address.

import { get } from "./api.js";
import { STATUS_KIND, chip, h, link, notice, number, seconds, select, table, versions, when } from "./dom.js";

const PURPOSES = ["train", "gate", "test", "ad_hoc", "demonstration"];
const PAGE = 50;

export async function traces(team, params, status, signal) {
  const query = Object.fromEntries(["store", "purpose", "status", "iteration", "task"].map((n) => [n, params.get(n) || ""]));
  const go = (change) => { location.hash = link(["traces", team], { ...query, ...change }); };
  const page = await get(["teams", team, "traces"], { ...query, limit: PAGE }, signal);
  const body = h("tbody", {}, page.data.map((row) => line(team, row, query)));
  const head = ["Started", "Trace", "Task", "Purpose", "Status", ">Outcome", "Team", ">Turns", ">Time", "Answer"];
  const list = table(head, body, { class: "list" });
  const more = moreButton(team, query, page.next, body);
  const node = h("div", {}, filters(team, query, go), page.data.length ? list : nothing(query), more);
  return { node, title: `Traces of ${team}` };
}

function filters(team, query, go) {
  const input = (name, label, type) => h("label", { class: "field" }, label, h("input", {
    type, name, value: query[name], min: type === "number" ? 0 : null, placeholder: "any",
    on: { change: (e) => go({ [name]: e.target.value.trim() }) },
  }));
  return h("div", { class: "bar" }, h("h1", {}, "Traces ", h("span", { class: "quiet" }, team)),
    select("Source", query.store, [["", "the run"], ["served", "production traffic"]], (v) => go({ store: v })),
    select("Purpose", query.purpose, [["", "any"], ...PURPOSES.map((p) => [p, p])], (v) => go({ purpose: v })),
    select("Status", query.status, [["", "any"], ...Object.keys(STATUS_KIND).map((p) => [p, p])], (v) => go({ status: v })),
    input("iteration", "Iteration", "number"), input("task", "Task", "text"));
}

function line(team, row, query) {
  const outcomes = Object.values(row.outcomes);
  const to = link(["traces", team, row.episode_id], { store: query.store });
  return h("tr", {},
    h("td", { class: "nowrap quiet" }, when(row.started_at)),
    h("td", {}, h("a", { href: to }, h("code", {}, row.episode_id.slice(0, 8)))),
    h("td", { class: "text" }, h("a", { class: "quiet", href: link(["compare", team, row.task_id], { store: query.store, purpose: row.purpose }) }, row.task_id), " ", row.task_prompt),
    h("td", { class: "nowrap" }, `${row.purpose} · ${row.iteration}`, row.variant ? h("span", { class: "quiet" }, ` ${row.variant}`) : null),
    h("td", {}, chip(row.status, STATUS_KIND[row.status])),
    h("td", { class: "num" }, outcomes.length ? outcomes.map((o) => number(o)).join(" / ") : h("span", { class: "quiet" }, "–")),
    h("td", { class: "nowrap", title: row.team_key }, row.alias ? chip(row.alias, row.alias) : null, " ", versions(row.policy_versions)),
    h("td", { class: "num" }, row.num_turns),
    h("td", { class: "num nowrap" }, seconds(row.duration_s)),
    h("td", { class: "text" }, row.answer || h("span", { class: "quiet" }, row.error || "none")));
}

function moreButton(team, query, next, body) {
  if (!next) return null;
  let before = next;
  const fault = h("span", { class: "fault" });
  const button = h("button", { type: "button", class: "more" }, "Load older traces");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const page = await get(["teams", team, "traces"], { ...query, before, limit: PAGE });
      body.append(...page.data.map((row) => line(team, row, query)));
      before = page.next;
      button.hidden = !before;
      fault.textContent = "";
    } catch (error) {
      fault.textContent = error.message;
    }
    button.disabled = false;
  });
  return h("p", {}, button, fault);
}

function nothing(query) {
  const isFiltered = query.purpose || query.status || query.iteration || query.task;
  if (isFiltered) return notice("", "No trace matches these filters", h("p", {}, "Remove a filter."));
  return query.store === "served"
    ? notice("", "No production traces are stored",
      h("p", {}, "They are stored if the run config sets ", h("code", {}, "gateway.capture"), " and the caller consents."))
    : notice("", "This run has no traces yet", h("p", {}, "Train the team: ", h("code", {}, "troupe train RUN.yaml")));
}

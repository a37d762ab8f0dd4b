// traces: the stored episodes of a team, newest first, with filters in the address.

import { get } from "./api.js";
import { STATUS_KIND, chip, h, link, notice, number, seconds, select, table, versions, when } from "./dom.js";

const PURPOSES = ["train", "gate", "test", "ad_hoc", "demonstration"];
const PAGE = 50;

export async function traces(team, params, status, signal) {
  const asked = Object.fromEntries(["store", "purpose", "status", "iteration", "task"].map((n) => [n, params.get(n) || ""]));
  const go = (change) => { location.hash = link(["traces", team], { ...asked, ...change }); };
  const found = await get(["teams", team, "traces"], { ...asked, limit: PAGE }, signal);
  const body = h("tbody", {}, found.data.map((row) => line(team, row, asked)));
  const head = ["Begun", "Trace", "Task", "Purpose", "Status", ">Outcome", "Team", ">Turns", ">Time", "Answer"];
  const list = table(head, body, { class: "list" });
  const more = moreButton(team, asked, found.next, body);
  const node = h("div", {}, filters(team, asked, go), found.data.length ? list : nothing(asked), more);
  return { node, title: `Traces of ${team}` };
}

function filters(team, asked, go) {
  const input = (name, label, type) => h("label", { class: "field" }, label, h("input", {
    type, name, value: asked[name], min: type === "number" ? 0 : null, placeholder: "any",
    on: { change: (e) => go({ [name]: e.target.value.trim() }) },
  }));
  return h("div", { class: "bar" }, h("h1", {}, "Traces ", h("span", { class: "quiet" }, team)),
    select("From", asked.store, [["", "the run"], ["served", "answers to people"]], (v) => go({ store: v })),
    select("Purpose", asked.purpose, [["", "any"], ...PURPOSES.map((p) => [p, p])], (v) => go({ purpose: v })),
    select("Status", asked.status, [["", "any"], ...Object.keys(STATUS_KIND).map((p) => [p, p])], (v) => go({ status: v })),
    input("iteration", "Iteration", "number"), input("task", "Task", "text"));
}

function line(team, row, asked) {
  const outcomes = Object.values(row.outcomes);
  const to = link(["traces", team, row.episode_id], { store: asked.store });
  return h("tr", {},
    h("td", { class: "nowrap quiet" }, when(row.started_at)),
    h("td", {}, h("a", { href: to }, h("code", {}, row.episode_id.slice(0, 8)))),
    h("td", { class: "text" }, h("a", { class: "quiet", href: link(["compare", team, row.task_id], { store: asked.store, purpose: row.purpose }) }, row.task_id), " ", row.task_prompt),
    h("td", { class: "nowrap" }, `${row.purpose} · ${row.iteration}`, row.variant ? h("span", { class: "quiet" }, ` ${row.variant}`) : null),
    h("td", {}, chip(row.status, STATUS_KIND[row.status])),
    h("td", { class: "num" }, outcomes.length ? outcomes.map((o) => number(o)).join(" / ") : h("span", { class: "quiet" }, "–")),
    h("td", { class: "nowrap", title: row.team_key }, row.arm ? chip(row.arm, row.arm) : null, " ", versions(row.policy_versions)),
    h("td", { class: "num" }, row.num_turns),
    h("td", { class: "num nowrap" }, seconds(row.duration_s)),
    h("td", { class: "text" }, row.answer || h("span", { class: "quiet" }, row.error || "none")));
}

function moreButton(team, asked, next, body) {
  if (!next) return null;
  let before = next;
  const fault = h("span", { class: "fault" });
  const button = h("button", { type: "button", class: "more" }, "Older ones");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const found = await get(["teams", team, "traces"], { ...asked, before, limit: PAGE });
      body.append(...found.data.map((row) => line(team, row, asked)));
      before = found.next;
      button.hidden = !before;
      fault.textContent = "";
    } catch (error) {
      fault.textContent = error.message;
    }
    button.disabled = false;
  });
  return h("p", {}, button, fault);
}

function nothing(asked) {
  const isFiltered = asked.purpose || asked.status || asked.iteration || asked.task;
  if (isFiltered) return notice("", "No stored trace is like that", h("p", {}, "Take a filter away."));
  return asked.store === "served"
    ? notice("", "No answer to people is kept",
      h("p", {}, "They are kept where the run's config says so (", h("code", {}, "gateway.capture"), ") and the caller consents."))
    : notice("", "The run has stored nothing yet", h("p", {}, "Train the team: ", h("code", {}, "troupe train RUN.yaml")));
}

// trace: one episode. Head, lanes, the chosen event with its tokens, the reward split.

import { get } from "./api.js";
import { STATUS_KIND, chip, h, link, number, seconds, select, versions, when } from "./dom.js";
import { eventDetail } from "./event.js";
import { eventsOf, groupColours, lanes } from "./lanes.js";
import { earnedBy, rewards } from "./rewards.js";
import { colourBy } from "./tokens.js";

/** Pixels that the frame around the lanes takes of their width, */
const FRAME = 30;
/** and what uses arrow keys itself. */
const OWN_KEYS = "input, select, textarea";

export async function trace(team, id, params, signal) {
  const store = params.get("store") || "";
  if (params.get("colour")) colourBy(params.get("colour"));
  const found = await get(["teams", team, "traces", id], { store }, signal);
  const viewer = viewerOf(found, { chosen: params.get("event"), keep: (event) => keep(team, id, store, event) });
  const node = h("div", { class: "trace" }, head(team, store, found), outcomeOf(found), viewer.node);
  const keys = (e) => viewer.key(e);
  document.addEventListener("keydown", keys);
  return { node, title: `Trace ${found.episode_id.slice(0, 8)}`, leave: () => { document.removeEventListener("keydown", keys); viewer.leave(); } };
}

function keep(team, id, store, event) {
  history.replaceState(null, "", link(["traces", team, id], { store, event }));
}

function head(team, store, found) {
  return h("header", { class: "bar" },
    h("h1", {}, h("a", { class: "quiet", href: link(["traces", team], { store }) }, "Traces"), " ", h("code", {}, found.episode_id.slice(0, 12))),
    chip(found.status, STATUS_KIND[found.status]), found.arm ? chip(found.arm, found.arm) : null,
    h("span", { class: "quiet" }, `${found.purpose}, iteration ${found.iteration}, ${when(found.started_at)}`), h("span", { class: "grow" }),
    h("a", { class: "button", href: link(["compare", team, found.task.task_id], { store, purpose: found.purpose }) }, "Compare teams on this task"));
}

/** What was asked and what came of it. */
export function outcomeOf(found) {
  const facts = [
    ["Versions", versions(found.policy_versions)], ["Workflow", found.workflow.split(":").at(-1)], ["Took", seconds(found.duration_s)],
    ["Ended", found.stop_reason || "–"], ["Seed", String(found.seed)], ["Group", `${found.group_id.slice(0, 8)} · ${found.episode_index}`],
    found.variant ? ["Variant", found.variant] : null, found.attempt > 1 ? ["Attempt", String(found.attempt)] : null,
    ...Object.entries(found.outcome_metadata).map(([name, value]) => [name, JSON.stringify(value)]),
  ].filter(Boolean);
  return h("section", { class: "asked" },
    h("div", {}, h("h3", {}, "Task ", h("code", {}, found.task.task_id), found.task.source ? ` from ${found.task.source}` : ""), h("pre", { class: "said" }, found.task.prompt)),
    h("div", {}, h("h3", {}, "Answer"), h("pre", { class: "said" }, found.answer || "(none)"),
      found.task.answers.length ? h("p", { class: "small quiet" }, "Right would be ", found.task.answers.map((a) => [h("code", {}, a), " "])) : null,
      found.error ? h("p", { class: "fault" }, found.error) : null),
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    found.feedback.map((said) => h("p", { class: "small" }, chip(said.score === null ? said.label || "feedback" : `score ${number(said.score)}`), " ",
      said.comment || "", said.answer ? [" right would be ", h("code", {}, said.answer)] : null, h("span", { class: "quiet" }, ` ${said.key}, ${when(said.at)}`))),
    found.is_version_mixed ? h("p", { class: "fault" }, "More than one version sampled this episode: it is kept out of evaluations.") : null);
}

/** Lanes, the chosen event and rewards. Args: chosen: index as text, or null; keep(index): told of each choice. */
export function viewerOf(found, { chosen, keep: told }) {
  const events = eventsOf(found);
  const node = h("div", { class: "viewer" });
  let at = events.some((e) => String(e.index) === chosen) ? Number(chosen) : events.find((e) => e.kind === "turn")?.index ?? null;
  let credit = found.rewards[0] || null;
  let scale = scaleOf(found, events);
  let width = 0;
  const choose = (index) => { at = index; told(index); draw(); };
  const draw = () => {
    const focused = document.activeElement?.closest?.(".block") !== null;
    const drawn = lanes(found, { scale, chosen: at, choose, rewards: earnedBy(credit), width: Math.max(420, (width || 900) - FRAME) });
    const event = events.find((e) => e.index === at);
    node.replaceChildren(
      h("div", { class: "bar" }, h("h2", {}, `${found.turns.length} turns, ${found.tool_calls.length} tool calls`), colours(found), h("span", { class: "grow" }),
        select("Across", scale, [["time", "time"], ["order", "order"]], (v) => { scale = v; draw(); }),
        found.rewards.length > 1 ? select("Credit", credit.credit_version, found.rewards.map((r) => [r.credit_version, r.credit_version]),
          (v) => { credit = found.rewards.find((r) => r.credit_version === v); draw(); }) : null),
      events.length ? h("div", { class: "scroll" }, drawn) : h("p", { class: "quiet" }, "Nothing happened in this episode."),
      event ? eventDetail(event, { reward: credit?.turns.find((t) => t.turn_index === at), choose }) : "",
      credit ? h("section", {}, h("h3", {}, `Rewards · outcome ${number(credit.outcome)} `, h("span", { class: "quiet" }, `credit version ${credit.credit_version}`)),
        rewards(credit, { chosen: at, choose })) : h("p", { class: "quiet" }, "No rewards: this episode was never credited."));
    if (focused) node.querySelector(`[data-event="${at}"]`)?.focus();
  };
  const key = (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!step || e.target.closest?.(OWN_KEYS)) return;
    const next = events[events.findIndex((of) => of.index === at) + step];
    if (next) choose(next.index);
  };
  const watch = new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (Math.abs(now - width) > 4) { width = now; requestAnimationFrame(draw); }
  });
  watch.observe(node);
  draw();
  return { node, key, leave: () => watch.disconnect() };
}

function colours(found) {
  const used = [...groupColours(found)];
  return h("span", { class: "legend" }, used.map(([group, n]) => h("span", {}, h("i", { class: `dot g${n}` }), `${group} v${found.policy_versions[group] ?? "?"}`)));
}

/** By time where most events can be seen so, else by order. */
function scaleOf(found, events) {
  const narrow = events.filter((e) => e.of.duration_s < found.duration_s / 100).length;
  return narrow * 2 > events.length ? "order" : "time";
}

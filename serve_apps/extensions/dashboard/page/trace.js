// trace: one episode -> its head, its lanes, the chosen event with its tokens, and the rewards.

import { get } from "./api.js";
import { STATUS_KIND, chip, h, link, number, seconds, select, versions, when } from "./dom.js";
import { eventDetail } from "./event.js";
import { eventsOf, groupColours, lanes } from "./lanes.js";
import { earnedBy, rewards } from "./rewards.js";
import { colourBy } from "./tokens.js";

/** Pixels that the frame around the lanes takes from their width. */
const FRAME = 30;
/** Elements that use the arrow keys themselves. */
const OWN_KEYS = "input, select, textarea";

export async function trace(team, id, params, signal) {
  const store = params.get("store") || "";
  if (params.get("colour")) colourBy(params.get("colour"));
  const episode = await get(["teams", team, "traces", id], { store }, signal);
  const viewer = viewerOf(episode, { chosen: params.get("event"), onChoose: (event) => keepInAddress(team, id, store, event) });
  const node = h("div", { class: "trace" }, head(team, store, episode), outcomeOf(episode), viewer.node);
  const keys = (e) => viewer.key(e);
  document.addEventListener("keydown", keys);
  return { node, title: `Trace ${episode.episode_id.slice(0, 8)}`, leave: () => { document.removeEventListener("keydown", keys); viewer.leave(); } };
}

function keepInAddress(team, id, store, event) {
  history.replaceState(null, "", link(["traces", team, id], { store, event }));
}

function head(team, store, episode) {
  return h("header", { class: "bar" },
    h("h1", {}, h("a", { class: "quiet", href: link(["traces", team], { store }) }, "Traces"), " ", h("code", {}, episode.episode_id.slice(0, 12))),
    chip(episode.status, STATUS_KIND[episode.status]), episode.alias ? chip(episode.alias, episode.alias) : null,
    h("span", { class: "quiet" }, `${episode.purpose}, iteration ${episode.iteration}, ${when(episode.started_at)}`), h("span", { class: "grow" }),
    h("a", { class: "button", href: link(["compare", team, episode.task.task_id], { store, purpose: episode.purpose }) }, "Compare teams on this task"));
}

/** The task, the answer and the facts of an episode. */
export function outcomeOf(episode) {
  const facts = [
    ["Versions", versions(episode.policy_versions)], ["Workflow", episode.workflow.split(":").at(-1)], ["Duration", seconds(episode.duration_s)],
    ["Stop reason", episode.stop_reason || "–"], ["Seed", String(episode.seed)], ["Group", `${episode.group_id.slice(0, 8)} · ${episode.episode_index}`],
    episode.variant ? ["Variant", episode.variant] : null, episode.attempt > 1 ? ["Attempt", String(episode.attempt)] : null,
    ...Object.entries(episode.outcome_metadata).map(([name, value]) => [name, JSON.stringify(value)]),
  ].filter(Boolean);
  return h("section", { class: "asked" },
    h("div", {}, h("h3", {}, "Task ", h("code", {}, episode.task.task_id), episode.task.source ? ` from ${episode.task.source}` : ""), h("pre", { class: "quoted" }, episode.task.prompt)),
    h("div", {}, h("h3", {}, "Answer"), h("pre", { class: "quoted" }, episode.answer || "(none)"),
      episode.task.answers.length ? h("p", { class: "small quiet" }, "Reference answer: ", episode.task.answers.map((a) => [h("code", {}, a), " "])) : null,
      episode.error ? h("p", { class: "fault" }, episode.error) : null),
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    episode.feedback.map((item) => h("p", { class: "small" }, chip(item.score === null ? item.label || "feedback" : `score ${number(item.score)}`), " ",
      item.comment || "", item.answer ? [" reference answer: ", h("code", {}, item.answer)] : null, h("span", { class: "quiet" }, ` ${item.key}, ${when(item.at)}`))),
    episode.explanation ? whyOf(episode.explanation) : null,
    episode.is_version_mixed ? h("p", { class: "fault" }, "More than one policy version sampled this episode, so evaluations leave it out.") : null);
}

/** The turn that `troupe why` found to have cost the episode most. */
function whyOf(found) {
  const cost = `${number(found.cost)} [${found.ci95.map(number).join(", ")}]`;
  return h("div", { class: "why" }, h("h3", {}, "Why it failed"),
    h("p", {}, found.is_certain ? "" : "No turn certainly cost anything. ", `Turn ${found.turn_index} of ${found.agent} cost most: ${cost} of the expected outcome, in ${found.num_replays} replays.`),
    found.alternative ? [h("p", { class: "small quiet" }, `Instead of what it said, this led to ${number(found.alternative.outcome)}:`), h("pre", { class: "quoted" }, found.alternative.completion || "(nothing)")] : null);
}

/** Lanes, the chosen event and rewards. Args: chosen: index as text, or null; onChoose(index): called at each choice. */
export function viewerOf(episode, { chosen, onChoose }) {
  const events = eventsOf(episode);
  const node = h("div", { class: "viewer" });
  let at = events.some((e) => String(e.index) === chosen) ? Number(chosen) : events.find((e) => e.kind === "turn")?.index ?? null;
  let credit = episode.rewards[0] || null;
  let scale = scaleOf(episode, events);
  let width = 0;
  const choose = (index) => { at = index; onChoose(index); draw(); };
  const draw = () => {
    const focused = document.activeElement?.closest?.(".block") !== null;
    const drawn = lanes(episode, { scale, chosen: at, choose, rewards: earnedBy(credit), width: Math.max(420, (width || 900) - FRAME) });
    const event = events.find((e) => e.index === at);
    node.replaceChildren(
      h("div", { class: "bar" }, h("h2", {}, `${episode.turns.length} turns, ${episode.tool_calls.length} tool calls`), colours(episode), h("span", { class: "grow" }),
        select("Horizontal axis", scale, [["time", "time"], ["order", "order"]], (v) => { scale = v; draw(); }),
        episode.rewards.length > 1 ? select("Credit", credit.credit_version, episode.rewards.map((r) => [r.credit_version, r.credit_version]),
          (v) => { credit = episode.rewards.find((r) => r.credit_version === v); draw(); }) : null),
      events.length ? h("div", { class: "scroll" }, drawn) : h("p", { class: "quiet" }, "This episode has no events."),
      event ? eventDetail(event, { reward: credit?.turns.find((t) => t.turn_index === at), choose }) : "",
      credit ? h("section", {}, h("h3", {}, `Rewards · outcome ${number(credit.outcome)} `, h("span", { class: "quiet" }, `credit version ${credit.credit_version}`)),
        rewards(credit, { chosen: at, choose })) : h("p", { class: "quiet" }, "No rewards: this episode was not scored."));
    if (focused) node.querySelector(`[data-event="${at}"]`)?.focus();
  };
  const key = (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!step || e.target.closest?.(OWN_KEYS)) return;
    const next = events[events.findIndex((other) => other.index === at) + step];
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

function colours(episode) {
  const used = [...groupColours(episode)];
  return h("span", { class: "legend" }, used.map(([group, n]) => h("span", {}, h("i", { class: `dot g${n}` }), `${group} v${episode.policy_versions[group] ?? "?"}`)));
}

/** "time" if most events are wide enough to see on a time axis, else "order". */
function scaleOf(episode, events) {
  const narrow = events.filter((e) => e.record.duration_s < episode.duration_s / 100).length;
  return narrow * 2 > events.length ? "order" : "time";
}

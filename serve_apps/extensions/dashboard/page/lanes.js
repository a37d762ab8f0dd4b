// lanes: the events of a trace -> a chart with a lane per agent and per tool, a block per event, and arrows to an event from its inputs.

import { s, seconds } from "./dom.js";

const LANE = 34;
const BLOCK = 20;
const LABEL = 128;
const AXIS = 20;
const MIN_WIDTH = 7;

/** Turns and tool calls in one list of events, by their common index. */
export function eventsOf(trace) {
  const turns = trace.turns.map((t) => ({ index: t.turn_index, kind: "turn", lane: t.agent, record: t }));
  const calls = trace.tool_calls.map((c) => ({ index: c.call_index, kind: "tool", lane: c.tool, record: c }));
  return [...turns, ...calls].sort((a, b) => a.index - b.index);
}

/** Colour number of each model group, the same wherever the trace is drawn. */
export function groupColours(trace) {
  const groups = [...new Set([...Object.keys(trace.policy_versions), ...trace.turns.map((t) => t.model_group)])].sort();
  return new Map(groups.map((group, i) => [group, i % 6]));
}

/** Args: scale "time" or "order"; chosen: index of an event or null; choose(index); rewards: Map of index -> reward. */
export function lanes(trace, { scale, chosen, choose, rewards, width }) {
  const events = eventsOf(trace);
  const names = [...new Set([...events.filter((e) => e.kind === "turn"), ...events.filter((e) => e.kind === "tool")].map(keyOf))];
  const position = scale === "time" ? byTime(trace, events, width) : byOrder(events, width);
  const y = (event) => AXIS + names.indexOf(keyOf(event)) * LANE + (LANE - BLOCK) / 2;
  const height = AXIS + names.length * LANE + 4;
  const boxes = new Map(events.map((e) => [e.index, { ...position(e), y: y(e) }]));
  const near = relatives(events, chosen);
  return s("svg", { class: "lanes", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Turns and tool calls by agent" },
    names.map((name, i) => laneOf(name, i, width)),
    scale === "time" ? ticks(trace, events, width, height) : null,
    events.flatMap((e) => e.record.parents.map((p) => arrow(boxes.get(p), boxes.get(e.index), near, p, e.index))),
    events.map((e) => block(e, boxes.get(e.index), { colours: groupColours(trace), chosen, near, choose, rewards })));
}

function keyOf(event) {
  return `${event.kind}:${event.lane}`;
}

function laneOf(key, i, width) {
  const [kind, ...name] = key.split(":");
  const text = name.join(":");
  return s("g", { class: `lane ${kind}` },
    s("line", { x1: LABEL, x2: width, y1: AXIS + i * LANE + LANE / 2, y2: AXIS + i * LANE + LANE / 2 }),
    s("text", { x: 0, y: AXIS + i * LANE + LANE / 2 + 4 }, text.length > 17 ? `${text.slice(0, 16)}…` : text, s("title", {}, `${kind} ${text}`)));
}

function endOf(trace, events) {
  return Math.max(trace.duration_s, ...events.map((e) => e.record.start_s + e.record.duration_s), 1e-6);
}

function byTime(trace, events, width) {
  const room = width - LABEL - MIN_WIDTH - 2;
  const end = endOf(trace, events);
  return (e) => ({ x: LABEL + (e.record.start_s / end) * room, width: Math.max(MIN_WIDTH, (e.record.duration_s / end) * room) });
}

function byOrder(events, width) {
  const step = Math.min(110, (width - LABEL) / Math.max(1, events.length));
  const gap = Math.min(14, step / 3);
  const at = new Map(events.map((e, i) => [e.index, i]));
  return (e) => ({ x: LABEL + at.get(e.index) * step, width: Math.max(3, step - gap) });
}

function ticks(trace, events, width, height) {
  const end = endOf(trace, events);
  const room = width - LABEL - MIN_WIDTH - 2;
  const rough = end / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((t) => t >= rough);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => {
    const x = LABEL + ((i * step) / end) * room;
    return s("g", { class: "tick" }, s("line", { x1: x, x2: x, y1: AXIS - 4, y2: height }),
      s("text", { x: x + 3, y: 11 }, i ? seconds(i * step) : "0"));
  });
}

/** All events that the chosen one depends on, and those that depend on it directly. */
function relatives(events, chosen) {
  const by = new Map(events.map((e) => [e.index, e]));
  const above = new Set();
  const walk = (index) => by.get(index)?.record.parents.forEach((p) => { if (!above.has(p)) { above.add(p); walk(p); } });
  if (chosen !== null) walk(chosen);
  return { chosen, above, below: new Set(events.filter((e) => e.record.parents.includes(chosen)).map((e) => e.index)) };
}

function arrow(from, to, near, parent, child) {
  if (!from || !to) return null;
  const lit = (child === near.chosen || near.above.has(child)) && near.above.has(parent);
  const isNext = parent === near.chosen && near.below.has(child);
  const [x1, y1, x2, y2] = [from.x + from.width, from.y + BLOCK / 2, to.x, to.y + BLOCK / 2];
  const bend = Math.max(8, Math.abs(x2 - x1) / 2);
  return s("path", { class: `arrow ${lit ? "above" : isNext ? "below" : ""}`, d: `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` });
}

function block(event, box, { colours, chosen, near, choose, rewards }) {
  const isTurn = event.kind === "turn";
  const { record } = event;
  const faulty = isTurn ? !record.is_format_ok : Boolean(record.error);
  const state = [event.index === chosen && "chosen", near.above.has(event.index) && "above", near.below.has(event.index) && "below", faulty && "faulty"];
  const kind = isTurn ? `turn g${colours.get(record.model_group)}` : "tool";
  const label = isTurn ? `#${event.index}` : record.error ? "error" : `#${event.index}`;
  const earned = rewards.get(event.index);
  return s("g", {
    class: `block ${kind} ${state.filter(Boolean).join(" ")}`, tabindex: 0, role: "button", "data-event": event.index,
    "aria-label": `${event.kind} ${event.index} of ${event.lane}`, "aria-pressed": event.index === chosen,
    on: { click: () => choose(event.index), keydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(event.index); } } },
  },
  s("title", {}, titleOf(event, earned)),
  s("rect", { x: box.x, y: box.y, width: box.width, height: BLOCK, rx: isTurn ? 4 : 10 }),
  isTurn && record.finish_reason === "length" ? s("rect", { class: "cut", x: box.x + box.width - 3, y: box.y, width: 3, height: BLOCK }) : null,
  faulty ? s("circle", { class: "mark", cx: box.x + box.width - 1, cy: box.y + 1, r: 4 }) : null,
  box.width >= 26 ? s("text", { x: box.x + 6, y: box.y + 14 }, label) : null,
  earned !== undefined && box.width >= 66 ? s("text", { class: "earned", x: box.x + box.width - 7, y: box.y + 14 }, earned.toFixed(2).replace("-", "−")) : null);
}

function titleOf(event, earned) {
  const { record } = event;
  const description = event.kind === "turn"
    ? `${record.agent}, round ${record.round_index}, ${record.model_group} v${record.policy_version}, ${record.num_completion_tokens} tokens, ${record.finish_reason}`
    : `${record.tool}, called by ${record.caller || "the workflow"}`;
  const fault = event.kind === "turn" ? record.format_fault : record.error;
  return `#${event.index} ${description}, ${seconds(record.duration_s)}${fault ? `\n${fault}` : ""}${earned !== undefined ? `\nreward ${earned}` : ""}`;
}

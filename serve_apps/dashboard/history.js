// history: figures of the last minutes, kept in the page, and their small curves.

import { s } from "./dom.js";

const MAX_POINTS = 90;
const kept = new Map();
let before = null;

/** Takes in one status; rates are what was added since the one before, of the same replicas. */
export function remember(status) {
  if (before?.now === status.now) return;
  push("in_flight", "", status.in_flight);
  push("waiting", "", status.waiting);
  const counts = countsOf(status);
  const replicas = status.replicas.map((of) => of.replica).sort().join(" ");
  const isSame = before && before.replicas === replicas && before.now < status.now;
  if (isSame) {
    const passed = status.now - before.now;
    let total = 0;
    for (const [name, count] of counts) {
      const rate = Math.max(0, count - (before.counts.get(name) || 0)) / passed;
      push("answers", name, rate);
      total += rate;
    }
    push("rate", "", total);
  }
  before = { replicas, now: status.now, counts };
}

function countsOf(status) {
  return new Map(status.teams.flatMap((team) => [...team.arms, ...team.gone].map((arm) =>
    [`${team.name}/${arm.team_version}`, arm.figures.failure_share?.num || 0])));
}

function push(kind, name, value) {
  const points = series(kind, name);
  points.push(value);
  if (points.length > MAX_POINTS) points.shift();
  kept.set(`${kind} ${name}`, points);
}

export function series(kind, name) {
  return kept.get(`${kind} ${name}`) || [];
}

/** A curve from zero up, without axes: the number stands beside it. */
export function spark(points, width = 72, height = 18) {
  const top = Math.max(...points, 1e-9);
  const x = (i) => width - 1 - (points.length - 1 - i) * ((width - 2) / (MAX_POINTS - 1));
  const at = points.map((p, i) => `${x(i).toFixed(1)},${(height - 1.5 - (p / top) * (height - 3)).toFixed(1)}`);
  return s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    s("line", { x1: 0, x2: width, y1: height - 1, y2: height - 1, class: "floor" }),
    points.length > 1 ? s("polyline", { points: at.join(" ") }) : null);
}

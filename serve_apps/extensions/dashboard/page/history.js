// history: the metrics of the last minutes, held in the page, and small line charts of them.

import { s } from "./dom.js";

const MAX_POINTS = 90;
const history = new Map();
let previous = null;

/** Adds one status. Rates are differences to the previous status, and need the same replicas. */
export function remember(status) {
  if (previous?.now === status.now) return;
  push("in_flight", "", status.in_flight);
  push("waiting", "", status.waiting);
  const counts = countsOf(status);
  const replicas = status.replicas.map(({ replica }) => replica).sort().join(" ");
  const isSame = previous && previous.replicas === replicas && previous.now < status.now;
  if (isSame) {
    const passed = status.now - previous.now;
    let total = 0;
    for (const [name, count] of counts) {
      const rate = Math.max(0, count - (previous.counts.get(name) || 0)) / passed;
      push("answers", name, rate);
      total += rate;
    }
    push("rate", "", total);
  }
  previous = { replicas, now: status.now, counts };
}

function countsOf(status) {
  return new Map(status.teams.flatMap((team) => [...team.deployed, ...team.gone].map((deployed) =>
    [`${team.name}/${deployed.team_version}`, deployed.figures.failure_share?.num || 0])));
}

function push(kind, name, value) {
  const points = series(kind, name);
  points.push(value);
  if (points.length > MAX_POINTS) points.shift();
  history.set(`${kind} ${name}`, points);
}

export function series(kind, name) {
  return history.get(`${kind} ${name}`) || [];
}

/** A line chart from zero up without axes: the number stands next to it. */
export function spark(points, width = 72, height = 18) {
  const top = Math.max(...points, 1e-9);
  const x = (i) => width - 1 - (points.length - 1 - i) * ((width - 2) / (MAX_POINTS - 1));
  const at = points.map((p, i) => `${x(i).toFixed(1)},${(height - 1.5 - (p / top) * (height - 3)).toFixed(1)}`);
  return s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    s("line", { x1: 0, x2: width, y1: height - 1, y2: height - 1, class: "floor" }),
    points.length > 1 ? s("polyline", { points: at.join(" ") }) : null);
}

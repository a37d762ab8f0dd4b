// rewards: the credit of an episode under one credit version -> the reward of each turn and its parts.

import { h, number, signed, table } from "./dom.js";

/** Map of turn index -> reward. */
export function earnedBy(credit) {
  return new Map((credit?.turns || []).map((t) => [t.turn_index, t.reward]));
}

/** Args: credit: {credit_version, outcome, turns}; choose(index): called with the chosen turn. */
export function rewards(credit, { chosen, choose }) {
  const parts = [...new Set(credit.turns.flatMap((t) => Object.keys(t.breakdown)))];
  const most = Math.max(...credit.turns.flatMap((t) => [1, -1].map((sign) => sumOf(t.breakdown, sign))), 1e-9);
  const rows = credit.turns.map((t) => h("tr", { class: t.turn_index === chosen ? "chosen" : null, on: { click: () => choose(t.turn_index) } },
    h("td", { class: "nowrap" }, h("span", { class: "quiet" }, `#${t.turn_index} `), t.agent),
    h("td", { class: "num" }, signed(t.reward)), h("td", { class: "wide" }, bar(t.breakdown, parts, most)),
    parts.map((name) => h("td", { class: "num quiet" }, name in t.breakdown ? signed(t.breakdown[name]) : "–"))));
  const heads = parts.map((name, i) => h("th", { scope: "col", class: "num" }, h("i", { class: `dot part${i % 5}` }), name));
  return h("div", {}, split(credit), table(["Turn", ">Reward", "Parts", ...heads], rows, { class: "rewards" }));
}

/** One bar for the whole episode: the share of each agent in the sum of absolute rewards. */
function split(credit) {
  const byAgent = new Map();
  for (const t of credit.turns) byAgent.set(t.agent, (byAgent.get(t.agent) || 0) + t.reward);
  const all = [...byAgent.values()].reduce((sum, v) => sum + Math.abs(v), 0);
  if (!all) return h("p", { class: "quiet" }, `Outcome ${number(credit.outcome)}, all rewards are zero.`);
  const pieces = [...byAgent].filter(([, v]) => v).map(([agent, value]) => {
    const share = Math.abs(value) / all;
    const text = `${agent} ${signed(value)}`;
    const piece = h("div", { class: `piece ${value < 0 ? "loss" : "gain"}`, title: text }, share > 0.1 ? text : "");
    piece.style.flexGrow = share;
    return piece;
  });
  return h("div", { class: "reward-split", role: "img", "aria-label": "Reward by agent" }, pieces);
}

function sumOf(breakdown, sign) {
  return Object.values(breakdown).reduce((sum, value) => sum + Math.max(0, sign * value), 0);
}

function bar(breakdown, parts, most) {
  const of = (sign) => parts.map((name, i) => {
    const value = breakdown[name] || 0;
    if (Math.sign(value) !== sign) return null;
    const piece = h("i", { class: `part${i % 5}`, title: `${name} ${signed(value)}` });
    piece.style.width = `${(Math.abs(value) / most) * 100}%`;
    return piece;
  });
  return h("div", { class: "diverging" }, h("div", { class: "minus" }, of(-1)), h("div", { class: "plus" }, of(1)));
}

// tokens: [text, logprob] of a completion -> the text, coloured by how unlikely each token was or by its advantage, and a
// strip of the logprobs.

import { h, number, percent, s, select, signed } from "./dom.js";

const BUCKETS = [0.9, 0.7, 0.5, 0.3, 0.15, 0.05, 0.01];
const DEEPEST = 6;
const STRENGTHS = 4;
let colouredBy = "probability";

/** Sets what tokens of every trace are coloured by: "probability" or "advantage". */
export function colourBy(what) {
  colouredBy = what;
}

function bucket(logprob) {
  if (logprob === null) return "none";
  const index = BUCKETS.findIndex((p) => Math.exp(logprob) >= p);
  return index < 0 ? BUCKETS.length : index;
}

/** One advantage per token; null where none is known. */
function advantagesOf(turn) {
  if (turn.advantages === null || turn.advantages === undefined) return null;
  return Array.isArray(turn.advantages) ? turn.advantages : turn.tokens.map(() => turn.advantages);
}

function strengthOf(value, most) {
  const strength = Math.min(STRENGTHS, Math.ceil((Math.abs(value ?? 0) / most) * STRENGTHS));
  return strength ? `${value < 0 ? "minus" : "plus"}${strength}` : "p0";
}

export function tokens(turn) {
  const node = h("div", { class: "tokens" });
  const draw = () => node.replaceChildren(...drawn(turn, (by) => { colourBy(by); draw(); }));
  draw();
  return node;
}

function drawn(turn, recolour) {
  const shown = turn.tokens;
  const advantages = advantagesOf(turn);
  const isByAdvantage = advantages !== null && colouredBy === "advantage";
  const most = Math.max(...(advantages || []).map(Math.abs), 1e-9);
  const colour = (logprob, i) => (isByAdvantage ? strengthOf(advantages[i], most) : `p${bucket(logprob)}`);
  const readout = h("div", { class: "readout quiet" }, summary(turn));
  const spans = shown.map(([text, logprob], i) =>
    h("span", { class: `tok ${colour(logprob, i)}`, "data-i": i }, text === "" ? "·" : text.replaceAll("\n", "↵\n")));
  const describe = (event) => {
    const token = event.target.closest(".tok");
    if (!token) return;
    const [text, logprob] = shown[Number(token.dataset.i)];
    const known = logprob === null ? "" : `  logprob ${number(logprob).replace("-", "−")}  probability ${percent(Math.exp(logprob), 2)}`;
    const advantage = advantages === null ? "" : `  advantage ${signed(advantages[token.dataset.i])}`;
    readout.textContent = `token ${token.dataset.i}  ${JSON.stringify(text)}${known}${advantage}`;
  };
  const rest = turn.num_completion_tokens - shown.length;
  const pick = advantages && select("Colour", colouredBy, [["probability", "probability"], ["advantage", "advantage"]], recolour);
  return [
    h("pre", { class: "quoted", on: { pointerover: describe, pointerleave: () => { readout.textContent = summary(turn); } } },
      spans.length ? spans : h("span", { class: "quiet" }, "(empty)"),
      rest > 0 ? h("span", { class: "quiet" }, ` … ${rest} more tokens are not shown one by one`) : null),
    ...(shown.length > 1 ? [strip(shown)] : []),
    h("div", { class: "row" }, readout, h("span", { class: "grow" }), isByAdvantage ? signs(most) : legend(), pick),
  ];
}

function summary(turn) {
  const known = turn.tokens.map(([, l]) => l).filter((l) => l !== null);
  if (!known.length) return `${turn.num_completion_tokens} tokens`;
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  return `${turn.num_completion_tokens} tokens, mean logprob ${number(mean).replace("-", "−")}, lowest ${number(Math.min(...known)).replace("-", "−")}`;
}

function strip(shown) {
  const bars = shown.map(([, logprob], i) => {
    const depth = Math.min(DEEPEST, -(logprob ?? 0));
    return `M${i + 0.5} 0V${Math.max(0.08, depth).toFixed(2)}`;
  });
  return s("svg", { class: "strip-lp", viewBox: `0 0 ${shown.length} ${DEEPEST}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    s("path", { d: bars.join("") }));
}

function signs(most) {
  return h("span", { class: "key small quiet" }, "advantage ", h("span", { class: `tok minus${STRENGTHS}` }, signed(-most)), h("span", { class: "tok" }, "0"),
    h("span", { class: `tok plus${STRENGTHS}` }, signed(most)));
}

function legend() {
  const marks = BUCKETS.map((p, i) => h("span", { class: `tok p${i}` }, `${p * 100}%`));
  return h("span", { class: "key small quiet" }, "probability ≥ ", marks, h("span", { class: `tok p${BUCKETS.length}` }, "less"));
}

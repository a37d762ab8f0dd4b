// tokens: [text, logprob] of a completion -> the text, coloured by how unlikely each token was, and a strip of the logprobs.

import { h, number, percent, s } from "./dom.js";

const BUCKETS = [0.9, 0.7, 0.5, 0.3, 0.15, 0.05, 0.01];
const DEEPEST = 6;

function bucket(logprob) {
  if (logprob === null) return "none";
  const place = BUCKETS.findIndex((p) => Math.exp(logprob) >= p);
  return place < 0 ? BUCKETS.length : place;
}

export function tokens(turn) {
  const shown = turn.tokens;
  const readout = h("div", { class: "readout quiet" }, summary(turn));
  const spans = shown.map(([text, logprob], i) =>
    h("span", { class: `tok p${bucket(logprob)}`, "data-i": i }, text === "" ? "·" : text.replaceAll("\n", "↵\n")));
  const tell = (event) => {
    const of = event.target.closest(".tok");
    if (!of) return;
    const [text, logprob] = shown[Number(of.dataset.i)];
    readout.textContent = logprob === null ? `token ${of.dataset.i}` : `token ${of.dataset.i}  ${JSON.stringify(text)}  logprob ${number(logprob).replace("-", "−")}  probability ${percent(Math.exp(logprob), 2)}`;
  };
  const rest = turn.num_completion_tokens - shown.length;
  return h("div", { class: "tokens" },
    h("pre", { class: "said", on: { pointerover: tell, pointerleave: () => { readout.textContent = summary(turn); } } },
      spans.length ? spans : h("span", { class: "quiet" }, "(nothing)"),
      rest > 0 ? h("span", { class: "quiet" }, ` … ${rest} more tokens are not shown one by one`) : null),
    shown.length > 1 ? strip(shown) : null, h("div", { class: "row" }, readout, h("span", { class: "grow" }), legend()));
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

function legend() {
  const marks = BUCKETS.map((p, i) => h("span", { class: `tok p${i}` }, `${p * 100}%`));
  return h("span", { class: "key small quiet" }, "probability ≥ ", marks, h("span", { class: `tok p${BUCKETS.length}` }, "less"));
}

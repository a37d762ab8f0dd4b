// event: the chosen turn or tool call -> its text, its tokens and its facts.

import { chip, h, number, percent, seconds, signed } from "./dom.js";
import { tokens } from "./tokens.js";

/** Args: reward: the reward of the turn, if it has one; choose(index): goes to another event. */
export function eventDetail(event, { reward, choose }) {
  return event.kind === "turn" ? turnDetail(event.record, reward, choose) : callDetail(event.record, choose);
}

function turnDetail(turn, reward, choose) {
  const fields = Object.entries(turn.fields);
  const cut = Object.entries(turn.cut);
  const options = Object.entries(turn.option_logprobs).sort((one, other) => other[1] - one[1]);
  return h("section", { class: "event" },
    h("header", { class: "row" }, h("h3", {}, `#${turn.turn_index} ${turn.agent}`), chip(`${turn.model_group} v${turn.policy_version}`),
      turn.finish_reason === "stop" ? null : chip(turn.finish_reason, "warn"), turn.is_format_ok ? null : chip(turn.format_fault || "invalid format", "bad"),
      typeof turn.advantages === "number" ? chip(`advantage ${signed(turn.advantages)}`, turn.advantages < 0 ? "bad" : "good") : null,
      turn.is_version_mixed ? chip("mixed versions", "bad") : null, reward ? chip(`reward ${signed(reward.reward)}`, reward.reward < 0 ? "bad" : "good") : null),
    h("div", { class: "columns" },
      h("div", {}, tokens(turn), h("details", {}, h("summary", {}, `Prompt, ${number(turn.num_prompt_tokens)} tokens`), h("pre", { class: "quoted" }, turn.prompt_text)),
        options.length ? [h("h4", {}, "Options, by probability"), h("dl", { class: "facts" }, options.map(([n, v]) => [h("dt", {}, n), h("dd", {}, percent(Math.exp(v)))]))] : null,
        fields.length ? [h("h4", {}, "Parsed fields"), h("dl", { class: "facts" }, fields.map(([n, v]) => [h("dt", {}, n), h("dd", {}, v || "(empty)")]))] : null),
      facts([
        ["Round", String(turn.round_index)], ["Inputs from", parents(turn.parents, choose)], ["Start", seconds(turn.start_s)], ["Duration", seconds(turn.duration_s)],
        ["Tokens per second", turn.duration_s ? number(turn.num_completion_tokens / turn.duration_s) : "–"], ["Sampling", sampling(turn.sampling)],
        ["Seed", String(turn.seed)], turn.num_attempts > 1 ? ["Attempts", String(turn.num_attempts)] : null,
        cut.length ? ["Cut from the prompt", cut.map(([n, c]) => `${n} ${number(c)} characters`).join(", ")] : null,
      ])));
}

function callDetail(call, choose) {
  return h("section", { class: "event" },
    h("header", { class: "row" }, h("h3", {}, `#${call.call_index} ${call.tool}`), call.error ? chip("error", "bad") : null),
    h("div", { class: "columns" },
      h("div", {}, h("h4", {}, "Request"), h("pre", { class: "quoted" }, pretty(call.request)),
        call.error ? [h("h4", {}, "Error"), h("pre", { class: "quoted fault" }, call.error)] : null,
        h("h4", {}, "Response"), h("pre", { class: "quoted" }, pretty(call.response))),
      facts([["Called by", call.caller || "the workflow"], ["Inputs from", parents(call.parents, choose)], ["Start", seconds(call.start_s)], ["Duration", seconds(call.duration_s)],
        call.num_attempts > 1 ? ["Attempts", String(call.num_attempts)] : null])));
}

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function parents(indices, choose) {
  if (!indices.length) return "the task only";
  return indices.map((index) => h("button", { type: "button", class: "plain", on: { click: () => choose(index) } }, `#${index}`));
}

function sampling(settings) {
  const more = [settings.top_p < 1 && `top_p ${settings.top_p}`, settings.top_k > 0 && `top_k ${settings.top_k}`, settings.min_p > 0 && `min_p ${settings.min_p}`].filter(Boolean);
  return [`temperature ${settings.temperature}`, ...more, `max ${settings.max_tokens} tokens`].join(", ");
}

function pretty(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

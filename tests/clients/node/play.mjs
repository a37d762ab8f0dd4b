// play: node's `openai` and Vercel's `ai` against a gateway, as tests/clients/play.py does with Python's frameworks.
//
//   tests/clients/make.sh node && node .cache/clients/node/play.mjs http://127.0.0.1:8000/v1 TEAM/AGENT [FRAMEWORK ...]

import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model, ...names] = process.argv.slice(2);
const apiKey = process.env.OPENAI_API_KEY ?? "none";
const question = "What is 6 times 7? Answer with a number.";
const messages = [{ role: "user", content: question }];
const Answer = z.object({ value: z.int() });
const Numbers = z.object({ a: z.int(), b: z.int() });
let calls = [];

function multiply({ a, b }) {
  calls.push([a, b]);
  return a * b;
}

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

function openai() {
  const client = new OpenAI({ baseURL: url, apiKey, maxRetries: 0 });
  const { $schema, ...parameters } = z.toJSONSchema(Numbers);
  const times = { type: "function", function: { name: "multiply", description: "Multiply.", parameters } };
  const runnable = { ...times, function: { ...times.function, function: multiply, parse: JSON.parse } };
  return {
    plain: async () => (await client.chat.completions.create({ model, messages })).choices[0].message.content,
    tools: async () => client.chat.completions.runTools({ model, messages, tools: [runnable] }).finalContent(),
    streaming: async () => {
      const parts = await all(await client.chat.completions.create({ model, messages, stream: true }));
      return parts.map((part) => part.choices[0]?.delta.content);
    },
    typed: async () => {
      const response_format = zodResponseFormat(Answer, "answer");
      return (await client.chat.completions.parse({ model, messages, response_format })).choices[0].message.parsed.value;
    },
    forced: async () => {
      const answer = await client.chat.completions.create({ model, messages, tools: [times], tool_choice: "required" });
      return JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
    },
    "plain, responses": async () => (await client.responses.create({ model, input: question })).output_text,
    "streaming, responses": async () => {
      const events = await all(await client.responses.create({ model, input: question, stream: true }));
      return events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
    },
  };
}

function aiCells(chat) {
  const tools = { multiply: tool({ description: "Multiply.", inputSchema: Numbers, execute: multiply }) };
  const asked = { model: chat, prompt: question, maxRetries: 0 };
  return {
    plain: async () => (await generateText(asked)).text,
    tools: async () => (await generateText({ ...asked, tools, stopWhen: stepCountIs(3) })).text,
    streaming: async () => all(streamText(asked).textStream),
    typed: async () => (await generateObject({ ...asked, schema: Answer })).object.value,
    "typed, output": async () =>
      (await generateText({ ...asked, output: Output.object({ schema: Answer }) })).output.value,
    "typed, streamed": async () => {
      const stream = streamObject({ ...asked, schema: Answer });
      await all(stream.partialObjectStream);
      return (await stream.object).value;
    },
    forced: async () => (await generateText({ ...asked, tools, toolChoice: "required" })).toolCalls[0].input,
    "forced, named": async () =>
      (await generateText({ ...asked, tools, toolChoice: { type: "tool", toolName: "multiply" } })).toolCalls[0].input,
  };
}

const frameworks = {
  openai,
  "@ai-sdk/openai-compatible": () =>
    aiCells(
      createOpenAICompatible({ name: "troupe", baseURL: url, apiKey, supportsStructuredOutputs: true })(model),
    ),
  "@ai-sdk/openai": () => aiCells(createOpenAI({ baseURL: url, apiKey })(model)),
};

function faultOf(cell, value) {
  const kind = cell.split(",")[0];
  const said = JSON.stringify(value);
  if (kind === "streaming") {
    const pieces = value.filter((piece) => piece);
    return pieces.length > 1 && pieces.join("").includes("42") ? "" : `pieces ${said}`;
  }
  if (kind === "typed") return value === 42 ? "" : `value ${said}`;
  if (kind === "forced") return value.a === 6 && value.b === 7 ? "" : `arguments ${said}`;
  if (kind === "tools" && !calls.some(([a, b]) => a === 6 && b === 7)) return `the tool was not called; ${said}`;
  return String(value).includes("42") ? "" : `text ${said}`;
}

for (const framework of names.length ? names : Object.keys(frameworks)) {
  const own = new URL(`node_modules/${framework}/package.json`, import.meta.url);
  const { version } = JSON.parse(readFileSync(own, "utf8"));
  for (const [cell, play] of Object.entries(frameworks[framework]())) {
    calls = [];
    let fault;
    try {
      fault = faultOf(cell, await play());
    } catch (error) {
      fault = `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify({ framework, version, cell, fault: fault.slice(0, 1000) }));
  }
}

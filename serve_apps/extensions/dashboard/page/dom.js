// dom: functions that build elements. Text is inserted as text, never as HTML: models and strangers wrote much of it.

const SVG = "http://www.w3.org/2000/svg";

/** h("a", {class: "x", href: "#/", on: {click}}, "text", child, ...): null children are left out, strings become text. */
export function h(tag, props = {}, ...children) {
  return build(document.createElement(tag), props, children);
}

/** The same in SVG. */
export function s(tag, props = {}, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function notice(kind, title, ...more) {
  return h("section", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : null }, h("h2", {}, title), ...more);
}

export function table(heads, rows, props = {}) {
  const body = rows instanceof Node ? rows : h("tbody", {}, rows);
  const head = h("thead", {}, h("tr", {}, heads.map(headOf)));
  return h("div", { class: "scroll" }, h("table", props, head, body));
}

/** The head of a column; a text that begins with > is over numbers and aligned right. */
function headOf(text) {
  if (text instanceof Node) return text;
  return text.startsWith(">") ? h("th", { scope: "col", class: "num" }, text.slice(1)) : h("th", { scope: "col" }, text);
}

export function chip(text, kind = "") {
  return h("span", { class: `chip ${kind}` }, text);
}

export function select(label, value, options, change) {
  const items = options.map(([option, text]) => h("option", { value: option, selected: option === value }, text));
  return h("label", { class: "field" }, label, h("select", { on: { change: (e) => change(e.target.value) } }, items));
}

export const STATUS_KIND = {
  ok: "good", truncated: "warn", agent_error: "bad", tool_error: "bad", timeout: "bad", infra_error: "bad",
};

/** A link within the page: parts are escaped, empty parameters left out. */
export function link(parts, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  return `#/${parts.map(encodeURIComponent).join("/")}${query.size ? `?${query}` : ""}`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(digits)));
}

export function signed(value, digits = 3) {
  return value > 0 ? `+${number(value, digits)}` : number(value, digits).replace("-", "−");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${Number((value * 100).toFixed(digits))}%`;
}

export function when(unix) {
  const at = new Date(unix * 1000);
  const pad = (n) => String(n).padStart(2, "0");
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  return `${day} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

export function versions(policyVersions) {
  return Object.entries(policyVersions).sort().map(([group, version]) => `${group} v${version}`).join(" · ");
}

// main: the fragment of the URL -> a view. #/ · #/traces/TEAM[/ID] · #/compare/TEAM[/TASK]

import { ApiError, get, storeKey, storedKey } from "./api.js";
import { compare } from "./compare.js";
import { h, link, notice, seconds } from "./dom.js";
import { noTeam, overview } from "./overview.js";
import { trace } from "./trace.js";
import { traces } from "./traces.js";

const POLL_MS = 2000;
const THEMES = ["auto", "light", "dark"];

const view = document.getElementById("view");
const pulse = document.getElementById("pulse");
let status = null;
let isUnreachable = false;
let current = { leave: null, abort: new AbortController() };

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  return { name: parts[0] || "overview", parts: parts.slice(1), params: new URLSearchParams(query) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function show() {
  const at = route();
  current.abort.abort();
  current.leave?.();
  current = { leave: null, abort: new AbortController() };
  const { signal } = current.abort;
  drawNav(at);
  isUnreachable = false;
  try {
    status ||= await get(["status"], {}, signal);
    drawNav(at);
    const page = await pageOf(at, signal);
    if (signal.aborted) return;
    view.replaceChildren(page.node);
    current.leave = page.leave || null;
    current.update = page.update || null;
    document.title = `${page.title || "Overview"} · Troupe`;
  } catch (error) {
    if (error.name !== "AbortError" && !signal.aborted) view.replaceChildren(explained(error));
  }
}

async function pageOf(at, signal) {
  const team = at.parts[0] || status.teams[0]?.name;
  if (at.name === "overview") return overview(status);
  if (!team) return { node: noTeam() };
  if (at.name === "traces" && at.parts[1]) return trace(team, at.parts[1], at.params, signal);
  if (at.name === "traces") return traces(team, at.params, status, signal);
  if (at.name === "compare") return compare(team, at.parts[1], at.params, status, signal);
  return { node: notice("", "Unknown page", h("a", { href: "#/" }, "Go to the overview")) };
}

function drawNav(at) {
  const team = at.parts[0] || status?.teams[0]?.name;
  const items = [["overview", "Overview", "#/"]];
  if (team) items.push(["traces", "Traces", link(["traces", team])], ["compare", "Compare", link(["compare", team])]);
  const links = items.map(([name, text, href]) =>
    h("a", { href, "aria-current": name === at.name ? "page" : null }, text));
  const teams = status?.teams.map((t) => t.name) || [];
  const pick = at.name !== "overview" && teams.length > 1
    ? h("select", { "aria-label": "Team", on: { change: (e) => { location.hash = link([at.name, e.target.value]); } } },
      teams.map((name) => h("option", { value: name, selected: name === team }, name)))
    : null;
  document.getElementById("key").hidden = !status?.has_keys;
  document.getElementById("nav").replaceChildren(...links, ...(pick ? [pick] : []));
}

function explained(error) {
  if (!(error instanceof ApiError)) return notice("bad", "The page has a bug", h("p", {}, String(error)));
  isUnreachable = error.status === 0;
  if (error.status === 401) return keyForm(storedKey() ? error.message : "");
  if (error.status === 403) return keyForm(`${error.message}. Create a key with this scope: troupe key NAME --file KEYS --scope admin`);
  const again = h("button", { type: "button", on: { click: show } }, "Try again");
  return notice("bad", error.status === 404 ? "Not found" : "The gateway returned an error", h("p", {}, error.message), again);
}

function keyForm(fault) {
  const input = h("input", { type: "password", name: "key", autocomplete: "off", placeholder: "troupe-…", "aria-label": "API key" });
  const submit = (event) => {
    event.preventDefault();
    storeKey(input.value.trim());
    status = null;
    show();
  };
  return notice("", "This gateway requires an API key",
    h("p", {}, "The key needs the scope admin. It is stored in this tab only."),
    h("form", { class: "row", on: { submit } }, input, h("button", { type: "submit" }, "Open")),
    fault ? h("p", { class: "fault" }, fault) : null);
}

async function poll() {
  if (!document.hidden) {
    try {
      status = await get(["status"]);
      pulse.className = "pulse live";
      pulse.textContent = `up ${seconds(Math.round(status.now - status.started_at))}`;
      pulse.title = `Replicas ${status.replicas.map((replica) => replica.pid).join(", ")}`;
      if (isUnreachable) show();
      current.update?.(status);
    } catch (error) {
      pulse.className = "pulse lost";
      pulse.textContent = error.status === 0 ? "offline" : error.status === 401 ? "no key" : "no status";
      pulse.title = error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}

function drawTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
}

document.getElementById("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(localStorage.getItem("troupe.theme") || "auto") + 1) % THEMES.length];
  localStorage.setItem("troupe.theme", next);
  drawTheme(next);
});
document.getElementById("key").addEventListener("click", () => view.replaceChildren(keyForm("")));
window.addEventListener("hashchange", show);
drawTheme(localStorage.getItem("troupe.theme") || "auto");
show();
poll();

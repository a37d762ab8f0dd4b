"""report_page: title, body -> a complete HTML page, light and dark, with Plotly inlined once. Needs no network."""

from __future__ import annotations

from html import escape

_CSS = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --text: #17202c; --dim: #66707f; --line: #e2e6ec;
  --accent: #2563eb; --good: #0f7a4d; --good-bg: #dcf5e8; --bad: #b42335; --bad-bg: #fde4e7; --warn: #8a5a00;
  --warn-bg: #fdf0d3; --neutral-bg: #edf0f4; --code: #f3f5f8; }
@media (prefers-color-scheme: dark) { :root { --bg: #10141a; --card: #181e26; --text: #e4e9f0; --dim: #93a0b1;
  --line: #2a323d; --accent: #6ea3ff; --good: #5fd6a0; --good-bg: #123626; --bad: #ff8d9a; --bad-bg: #41191f;
  --warn: #f2c069; --warn-bg: #3d2e0e; --neutral-bg: #262e39; --code: #11161d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 18px; } h2 { font-size: 19px; margin: 40px 0 2px; } h3 { font-size: 15px;
  margin: 0; }
.hint, .dim { color: var(--dim); } .hint { margin: 0 0 12px; } .dim { font-size: 13px; font-weight: 400; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 14px; }
section > * + .grid, section > * + .card { margin-top: 14px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 4px; }
.chart { height: 270px; }
.stat { display: flex; flex-direction: column; gap: 4px; }
.stat .name { color: var(--dim); font-size: 13px; }
.stat .foot { color: var(--dim); font-size: 13px;
  margin-top: auto; }
.stat .value { font-size: 34px; font-weight: 650; line-height: 1.15; font-variant-numeric: tabular-nums; }
.stat .value small { font-size: 15px; font-weight: 400; color: var(--dim); margin-left: 6px; }
.stat.good .value { color: var(--good); } .stat.bad .value { color: var(--bad); }
.scale { position: relative; height: 8px; border-radius: 4px; background: var(--neutral-bg); margin: 6px 0; }
.scale i { position: absolute; top: 0; bottom: 0; min-width: 3px; border-radius: 4px; background: var(--dim);
  opacity: .55; }
.scale b { position: absolute; top: -3px; width: 3px; height: 14px; margin-left: -1px; border-radius: 2px;
  background: var(--text); }
.stat.accent .scale i { background: var(--accent); opacity: .7; }
.notes { margin-top: 14px; padding: 10px 16px; border-left: 3px solid var(--accent); color: var(--text);
  background: var(--card); border-radius: 0 8px 8px 0; } .notes p { margin: 2px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
tr:last-child > * { border-bottom: 0; } tr:first-child th { color: var(--dim); font-weight: 500; }
td.num { white-space: nowrap; font-variant-numeric: tabular-nums; } td.wide { min-width: 240px; }
td .badge, tr:first-child th { white-space: nowrap; }
.facts th { width: 220px; color: var(--dim) !important; font-weight: 500; }
.funnel th:first-child { white-space: nowrap; font-weight: 600; color: var(--text); }
.funnel { table-layout: fixed; min-width: 760px; }
.funnel td { min-width: 100px; }
.bar { position: relative; display: flex; justify-content: space-between; gap: 8px;
  padding: 2px 8px; border-radius: 5px; background: var(--neutral-bg); overflow: hidden;
  font-variant-numeric: tabular-nums; }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--accent); opacity: .25;
  }
.bar span { position: relative; }
.badge { display: inline-block; padding: 0 8px; border-radius: 9px; font-size: 12.5px; line-height: 20px;
  background: var(--neutral-bg); font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.badge.good { color: var(--good); background: var(--good-bg); }
.badge.bad { color: var(--bad);
  background: var(--bad-bg); }
.badge.warn { color: var(--warn); background: var(--warn-bg); }
.example .task { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline; white-space: pre-wrap;
  margin-bottom: 10px; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 20px; }
.side { min-width: 0; }
.head { display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: baseline; }
.turn { border-top: 1px solid var(--line); padding: 9px 0 7px; margin-top: 9px; }
pre { margin: 6px 0; padding: 8px 10px; border-radius: 6px; background: var(--code); white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details summary { cursor: pointer; color: var(--dim); font-size: 13px;
  }
.turn details { display: inline-block; margin-right: 16px; }
.turn details[open] { display: block; margin-right: 0; }
details.more { margin-top: 14px; } details.more summary { margin-bottom: 12px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 6px 0; font-size: 13px; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.fault { color: var(--bad); margin: 6px 0; }
"""

_JS = """
const theme = () => {
  const css = getComputedStyle(document.documentElement), color = name => css.getPropertyValue(name).trim();
  return { text: color("--text"), dim: color("--dim"), line: color("--line"), card: color("--card") };
};
const merge = (base, extra) => {
  for (const [key, value] of Object.entries(extra))
    base[key] = value && typeof value === "object" && !Array.isArray(value) ? merge(base[key] || {}, value) : value;
  return base;
};
const draw = element => {
  const spec = element.figure ||= JSON.parse(element.querySelector("script").textContent), t = theme();
  const axis = { gridcolor: t.line, zerolinecolor: t.line, linecolor: t.line, automargin: true,
    title: { font: { size: 12, color: t.dim } }, tickfont: { color: t.dim } };
  const layout = merge({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 12, t: 8, b: 40 },
    font: { family: "system-ui, sans-serif", size: 12, color: t.text }, hovermode: "x unified",
    hoverlabel: { bgcolor: t.card, bordercolor: t.line, font: { color: t.text } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
    xaxis: structuredClone({ ...axis, showgrid: false }), yaxis: structuredClone(axis),
  }, structuredClone(spec.layout));
  Plotly.react(element, structuredClone(spec.data), layout, { responsive: true, displayModeBar: false });
};
const isOpen = element => !element.closest("details:not([open])");
const all = () => document.querySelectorAll(".chart");
all().forEach(element => isOpen(element) && draw(element));
document.querySelectorAll("details.more").forEach(
  details => details.addEventListener("toggle", () => details.querySelectorAll(".chart").forEach(draw)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all().forEach(e => e.figure && draw(e)));
"""


def page(*, title: str, body: str) -> str:
    """The whole document; `body` is HTML already."""
    from plotly.offline import get_plotlyjs

    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body><main>{body}</main>\n"
        f"<script>{get_plotlyjs()}</script>\n<script>{_JS}</script></body></html>\n"
    )

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

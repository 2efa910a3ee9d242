"use strict";
// Draws the page's figures, which are JSON, in the colours of its theme; again when a button is pressed.
const { figures, axes } = JSON.parse(document.getElementById("curves").textContent);
const AXES = { steps: "optimizer step", tokens: "tokens", hours: "hours since the first step logged" };
const touch = matchMedia("(pointer: coarse)").matches;
const hidden = new Set();
let axis = "steps";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function at(knots, step) { // converts a step to the present axis, linearly between two knots
  const to = knots[axis], from = knots.steps;
  if (!to) return null;
  let i = from.findIndex((knot) => knot >= step);
  if (i < 0) return to[to.length - 1];
  if (i === 0) return from[0] ? (axis === "tokens" ? (to[0] * step) / from[0] : to[0]) : to[0];
  return to[i - 1] + ((to[i] - to[i - 1]) * (step - from[i - 1])) / (from[i] - from[i - 1]);
}

function draw(plot) {
  if (plot.offsetParent === null) return; // folded: drawn when it is opened
  const { data, layout } = figures[plot.dataset.figure];
  const traces = data.map((trace) => {
    const color = css(`--c${trace.meta.colour % 7}`);
    return {
      ...trace,
      type: "scatter",
      x: axis === "steps" || trace.meta.is_fixed ? trace.x : trace.x.map((step) => at(axes[trace.meta.run], step)),
      visible: !hidden.has(trace.meta.run),
      line: { ...trace.line, color },
      marker: { ...trace.marker, color },
      fillcolor: color + "38",
    };
  });
  const lines = { gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true, fixedrange: touch };
  const font = { family: "system-ui, sans-serif", size: 12, color: css("--soft") };
  Plotly.react(plot, traces, {
    ...layout,
    font,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    width: plot.clientWidth,
    height: plot.clientHeight,
    margin: { l: 44, r: 12, t: 10, b: 36 },
    legend: { orientation: "h", y: 1, yanchor: "bottom", traceorder: "normal" },
    hovermode: layout.hovermode || "x unified",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { ...font, color: css("--text") } },
    dragmode: touch ? false : "zoom",
    xaxis: { ...lines, rangemode: "tozero", title: { text: AXES[axis], standoff: 6 }, ...layout.xaxis },
    yaxis: { ...lines, ...layout.yaxis, zeroline: false },
  }, { displayModeBar: false });
}

const drawAll = () => document.querySelectorAll(".plot").forEach(draw);

document.addEventListener("click", ({ target }) => {
  if (target.dataset.axis) {
    axis = target.dataset.axis;
    document.querySelectorAll("[data-axis]").forEach((b) => b.setAttribute("aria-pressed", b === target));
    drawAll();
  } else if (target.dataset.log) {
    const { yaxis } = figures[target.dataset.log].layout;
    yaxis.type = yaxis.type === "log" ? "linear" : "log";
    target.setAttribute("aria-pressed", yaxis.type === "log");
    draw(document.querySelector(`.plot[data-figure="${target.dataset.log}"]`));
  } else if (target.dataset.run) {
    target.checked ? hidden.delete(+target.dataset.run) : hidden.add(+target.dataset.run);
    drawAll();
  }
});

function start() {
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => draw(target)));
  document.querySelectorAll(".plot").forEach((plot) => resized.observe(plot)); // also draws what is unfolded
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

if (window.Plotly) {
  start();
} else { // the page was moved: plotly.js may have been copied into its folder
  const copy = document.createElement("script");
  copy.src = document.querySelector("script[src]").getAttribute("src").split("/").pop();
  copy.onload = start;
  copy.onerror = () => { document.getElementById("missing").hidden = false; };
  document.body.append(copy);
}

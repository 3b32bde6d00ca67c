"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  const plots = [...document.querySelectorAll(".plot")];
  const NARROW = 420;  // width in pixels below which a plot has no room for a toolbar beside long names
  const MAX_NARROW_NAME = 26;
  const isVisible = (plot) => !plot.closest("details:not([open])");

  function draw(plot) {
    const figure = figures[plot.dataset.figure];
    const axis = { automargin: true, zeroline: false };
    const isNarrow = plot.clientWidth < NARROW;
    const shorten = (name) => name?.length > MAX_NARROW_NAME ? `…${name.slice(1 - MAX_NARROW_NAME)}` : name;
    const data = isNarrow ? figure.data.map((trace) => ({ ...trace, name: shorten(trace.name) })) : figure.data;
    Plotly.react(plot, data, {
      autosize: true,
      // The toolbar stands in the right margin, beside the legend, which is as wide as the plot at most.
      margin: { l: 10, r: 40, t: 10, b: 10 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 12 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: "#22272e", bordercolor: "#22272e" },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      showlegend: figure.showlegend,
      modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: "#8b949e", activecolor: "#0b5cad" },
      xaxis: { ...axis, title: { text: "step" } },
      yaxis: { ...axis, ...figure.yaxis },
      shapes: figure.shapes,
    }, { ...config, displayModeBar: !isNarrow });
    plot.dataset.drawn = "yes";
  }
  const drawVisible = () => plots.filter((plot) => isVisible(plot) && !plot.dataset.drawn).forEach((plot) => draw(plot));

  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", drawVisible);

  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = { "": "as the system", light: "light", dark: "dark" };
  button.hidden = false;
  button.addEventListener("click", () => {
    const names = Object.keys(themes);
    const next = names[(names.indexOf(root.dataset.theme ?? "") + 1) % names.length];
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    button.querySelector("span").textContent = themes[next];
  });

  const openedForPrint = [];
  window.addEventListener("beforeprint", () => {
    openedForPrint.push(...document.querySelectorAll("details:not([open])"));
    for (const details of openedForPrint) details.open = true;
    drawVisible();
    for (const plot of plots) Plotly.relayout(plot, { autosize: false, width: 660, height: 280 });
  });
  window.addEventListener("afterprint", () => {
    for (const details of openedForPrint.splice(0)) details.open = false;
    for (const plot of plots) Plotly.relayout(plot, { autosize: true, width: null, height: null });
  });
  drawVisible();
})();

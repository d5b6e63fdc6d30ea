"use strict";
(async () => {
  const parse = (id) => JSON.parse(document.getElementById(id).textContent);
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.appendChild(script);

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const themes = parse("themes");
  const theme = () => themes[dark.matches ? "dark" : "light"];
  const webgl = Boolean(document.createElement("canvas").getContext("webgl"));
  const config = { responsive: true, displaylogo: false, showSendToCloud: false }; // figures stay here
  const drawn = [];
  for (const place of document.querySelectorAll("[data-figure]")) {
    const { data, layout } = parse(place.dataset.figure);
    if (!webgl && data.some((trace) => trace.type === "parcoords")) {
      place.textContent = "This figure needs WebGL, which this browser does not offer.";
      continue;
    }
    for (const trace of data) if (!webgl && trace.type === "scattergl") trace.type = "scatter";
    layout.template = theme();
    await Plotly.newPlot(place, data, layout, config);
    place.dataset.drawn = "yes";
    drawn.push(place);
  }
  dark.addEventListener("change", () => {
    for (const place of drawn) Plotly.relayout(place, { template: theme() });
  });
  document.documentElement.dataset.drawn = String(drawn.length);
})();

// Charts by ECharts. Colours are read from the page, so that a theme switch is a redraw.
const drawn = new Map();

function colour(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return value.includes(",") ? `rgb(${value})` : value;
}

function draw(id, options, note) {
  const box = document.getElementById(id);
  if (drawn.has(id)) drawn.get(id).dispose();
  drawn.delete(id);
  box.classList.toggle("empty", options === null);
  box.textContent = options === null ? note || "No comparable tokens." : "";
  if (options === null) return null;
  const chart = echarts.init(box, null, { renderer: "svg" });
  const line = { lineStyle: { color: colour("line") } };
  const axis = (given) => ({
    axisLabel: { color: colour("quiet"), hideOverlap: true }, nameTextStyle: { color: colour("quiet") }, axisLine: line,
    axisTick: line, splitLine: line, nameLocation: "middle", nameGap: 28, ...given,
  });
  chart.setOption({
    animation: false, aria: { enabled: true }, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    ...options, grid: { left: 8, right: 24, top: 30, bottom: 8, outerBoundsMode: "same", outerBoundsContain: "all", ...options.grid },
    tooltip: { confine: true, backgroundColor: colour("card"), borderColor: colour("line"), textStyle: { color: colour("ink"), fontSize: 13 },
      ...options.tooltip },
    legend: options.legend ? { top: 0, textStyle: { color: colour("quiet") }, ...options.legend } : undefined,
    xAxis: axis(options.xAxis), yAxis: axis({ nameGap: 50, ...options.yAxis }),
  });
  drawn.set(id, chart);
  return chart;
}

function logOrPlain(values) {
  return values.some((value) => value !== null && !(value > 0)) ? "value" : "log";
}

function drawTrend(onPick, current) {
  const names = report.rollouts.map((one) => one.name.replace("rollout ", ""));
  const lines = [["mean |δ|", "mean", "solid", "circle"], ["95th percentile", "p95", "dashed", "rect"], ["largest |δ|", "max", "dotted", "diamond"]];
  const colours = ["pos", "one", "neg"];
  const all = report.rollouts.flatMap((one) => lines.map(([, key]) => one.abs_diff[key]));
  const marked = report.rollouts.map((one, i) => [i, one]).filter(([, one]) => one.findings.length && one.abs_diff.mean !== null);
  const chart = draw("trend", {
    legend: {}, tooltip: { trigger: "axis", valueFormatter: (value) => number(value) },
    xAxis: { type: "category", data: names, name: "rollout" }, yAxis: { type: logOrPlain(all), name: "|δ| (nats)" },
    series: lines.map(([name, key, style, symbol], k) => ({
      name, type: "line", symbol, symbolSize: 7, connectNulls: false, lineStyle: { type: style, color: colour(colours[k]) }, itemStyle: { color: colour(colours[k]) },
      data: report.rollouts.map((one) => one.abs_diff[key]),
      markPoint: k ? undefined : { symbol: "triangle", symbolSize: 13, symbolOffset: [0, -14], itemStyle: { color: colour("fault") }, label: { show: false },
        data: marked.map(([i, one]) => ({ coord: [i, one.abs_diff.mean], name: one.findings.map((f) => f.code).join(", ") })) },
      markLine: k ? undefined : { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: colour("focus"), type: "solid" }, data: [{ xAxis: current }] },
    })),
  });
  if (chart) chart.getZr().on("click", (event) => {
    const place = chart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY])[0];
    if (place >= 0 && place < names.length) onPick(Math.round(place));
  });
}

function drawSweep(sweep) {
  const lines = [["tokens dropped or clipped", "touched", "solid", "circle", "pos"], ["mean weight", "mean_weight", "dashed", "rect", "one"],
    ["effective samples", "ess", "dotted", "diamond", "neg"], ["|A·w| kept", "advantage_kept", "dashed", "triangle", "quiet"]];
  const numbers = sweep.values.every((value) => typeof value === "number");
  const series = lines.filter(([, key]) => sweep[key].some((value) => value !== null));
  draw("sweep", sweep.n_tokens ? {
    legend: {}, tooltip: { trigger: "axis", valueFormatter: (value) => number(value) },
    xAxis: numbers ? { type: "value", scale: true, name: sweep.parameter } : { type: "category", data: sweep.values.map(String), name: sweep.parameter },
    yAxis: { type: "value", name: "share" },
    series: series.map(([name, key, style, symbol, ink]) => ({
      name, type: "line", symbol, symbolSize: 7, connectNulls: false, lineStyle: { type: style, color: colour(ink) }, itemStyle: { color: colour(ink) },
      data: numbers ? sweep.values.map((value, i) => [value, sweep[key][i]]).sort((a, b) => a[0] - b[0]) : sweep[key],
    })),
  } : null, sweep.skipped.join("; "));
  $("sweep-note").textContent = `${sweep.policy} (${sweep.framework}) with other values of ${sweep.parameter}, on ${number(sweep.n_tokens)} tokens of all rollouts: the part that is dropped or clipped, and the mean weight, effective samples and part of the signal that are left.`;
}

function drawRollout(one) {
  drawHistogram(one.histogram);
  drawDensity(one.density);
  drawGroups("decile", one.drift.decile, (row) => `${row.decile * 10}–${row.decile * 10 + 10} %`, "part of the response");
  drawGroups("turn", one.drift.turn, (row) => String(row.turn + 1), "turn");
}

function edges(count, limit, width) {
  return Array.from({ length: count }, (_, i) => {
    if (i === 0) return `below ${number(-limit)}`;
    if (i === count - 1) return `above ${number(limit)}`;
    return number(-limit + (i - 0.5) * width, 2);
  });
}

function drawHistogram(histogram) {
  if (!histogram) return draw("histogram", null);
  const labels = edges(histogram.counts.length, histogram.limit, histogram.width);
  return draw("histogram", {
    tooltip: { trigger: "axis", formatter: ([bar]) => `δ ${labels[bar.dataIndex]}: ${number(histogram.counts[bar.dataIndex])} tokens` },
    xAxis: { type: "category", data: labels, name: "δ (nats)", axisLabel: { color: colour("quiet"), hideOverlap: true, showMinLabel: true, showMaxLabel: true } },
    yAxis: { type: "log", min: 0.5, startValue: 0.5, name: "tokens", axisLabel: { color: colour("quiet"), formatter: (value) => (value < 1 ? "" : number(value)) } },
    series: [{ type: "bar", barCategoryGap: "5%", data: histogram.counts.map((count) => (count ? count : null)),
      itemStyle: { color: (bar) => (bar.dataIndex < histogram.counts.length / 2 - 1 ? colour("neg") : colour("pos")) } }],
  });
}

function drawDensity(density) {
  if (!density) return draw("density", null);
  const rows = edges(density.rows, density.limit, density.width);
  const columns = Array.from({ length: density.columns }, (_, i) => number(density.low + i * density.step, 2));
  const most = Math.max(...density.cells.map(([, , count]) => count));
  return draw("density", {
    grid: { right: 62, top: 12 },
    tooltip: { formatter: (cell) => `log μ from ${columns[cell.value[0]]}, δ ${rows[cell.value[1]]}: ${number(cell.value[3])} tokens` },
    xAxis: { type: "category", data: columns, name: "log μ (nats)", splitLine: { show: false } },
    yAxis: { type: "category", data: rows, name: "δ (nats)", nameGap: 74, splitLine: { show: false },
      axisLabel: { color: colour("quiet"), interval: (i) => i % 5 === 0 } },
    visualMap: { min: 0, max: Math.max(Math.log10(most), 0.3), dimension: 2, calculable: false, right: 0, top: "middle", itemHeight: 110, itemWidth: 12,
      text: [`${number(most)}`, "1"], textStyle: { color: colour("quiet") },
      inRange: { color: document.documentElement.dataset.now === "dark" ? ["#2b3f57", "#5ca0f0", "#e8f2ff"] : ["#cfe0f4", "#5b95d6", "#0b2f5c"] } },
    series: [{ type: "heatmap", data: density.cells.map(([x, y, count]) => [x, y, Math.log10(count), count]) }],
  });
}

function drawGroups(id, rows, label, name) {
  if (!rows.length) return draw(id, null);
  return draw(id, {
    legend: {}, tooltip: { trigger: "axis", formatter: (bars) => {
      const row = rows[bars[0].dataIndex];
      return `${name} ${label(row)}<br>mean |δ| ${number(row.mean_abs)}<br>mean δ ${number(row.mean)}<br>${number(row.n_tokens)} tokens`;
    } },
    xAxis: { type: "category", data: rows.map(label), name }, yAxis: { type: "value", name: "nats", axisLabel: { color: colour("quiet"), formatter: (value) => number(value) } },
    series: [
      { name: "mean |δ|", type: "bar", barMaxWidth: 36, data: rows.map((row) => row.mean_abs), itemStyle: { color: colour("pos") } },
      { name: "mean δ", type: "line", symbol: "diamond", symbolSize: 8, data: rows.map((row) => row.mean), itemStyle: { color: colour("neg") }, lineStyle: { color: colour("neg") } },
    ],
  });
}

function drawProfile(sample, onPick) {
  const first = sample.first;
  const data = Array.from(sample.delta, (value, i) => [i + first, sample.kind[i] === 0 ? value : null]);
  const line = (at, text, style) => ({ xAxis: at, label: { formatter: text, position: "insideEndTop", color: colour("quiet"), fontSize: 10 }, lineStyle: { type: style } });
  const within = (at) => at > first && at < first + sample.n;
  const marks = [
    ...sample.chunks.filter(([at]) => within(at)).map(([at, rank]) => line(at - 0.5, sample.chunks.length > 12 ? "" : `CP${rank}`, "dashed")),
    ...sample.turns.filter(within).map((at) => line(at - 0.5, sample.turns.length > 12 ? "" : `turn ${sample.turns.indexOf(at) + 1}`, "dotted")),
  ];
  const few = sample.n <= 400;
  const chart = draw("profile", data.some(([, value]) => value !== null) ? {
    grid: { top: 14, bottom: sample.n > 60 ? 30 : 8 },
    tooltip: { trigger: "axis", formatter: ([point]) => `token ${point.value[0]}: δ ${number(point.value[1])}` },
    dataZoom: sample.n > 60 ? [{ type: "slider", height: 16, bottom: 4, borderColor: colour("line"), textStyle: { color: colour("quiet") } }] : undefined,
    xAxis: { type: "value", min: first, max: first + Math.max(sample.n - 1, 1), minInterval: 1, name: sample.n > 60 ? "" : "token of the response", splitLine: { show: false } },
    yAxis: { type: "value", name: "δ", axisLabel: { color: colour("quiet"), formatter: (value) => number(value) } },
    series: [{ type: few ? "bar" : "line", barWidth: few ? "70%" : undefined, showSymbol: false, large: !few, sampling: few ? undefined : "minmax", connectNulls: false, data,
      lineStyle: { width: 1, color: colour("pos") }, itemStyle: { color: (point) => (point.value && point.value[1] < 0 ? colour("neg") : colour("pos")) },
      markLine: { silent: true, symbol: "none", lineStyle: { color: colour("quiet") }, data: marks } }],
  } : null, "No token of this sample has both log-probs.");
  if (chart) chart.getZr().on("click", (event) => {
    const at = Math.round(chart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY])[0]) - first;
    if (at >= 0 && at < sample.n) onPick(at);
  });
}

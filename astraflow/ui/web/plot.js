// Curves: uPlot with the page's colours, a band each, a tooltip, and points that open something.

import { css, h, num } from "./dom.js";

const { uPlot } = globalThis;

/**
 * Draws curves over each other.
 * curves: [{ name, colour, x: [], y: [], low?: [], high?: [], points?: true, open?: (index) => void }]
 */
export function plot(place, { curves, height = 380, xLabel, tellX, tellY, isTime = false, isSmall = false }) {
  const tables = [];
  const series = [{}];
  const bands = [];
  const drawn = [];
  for (const curve of curves) {
    const columns = [curve.x, curve.y];
    drawn.push({ curve, at: series.length });
    series.push({
      stroke: curve.colour,
      width: curve.points ? 0 : isSmall ? 1.25 : 1.75,
      spanGaps: true,
      points: curve.points ? { show: true, size: 8, fill: curve.colour, stroke: css("--paper"), width: 1.5 } : { show: curve.x.length === 1, size: 5, fill: curve.colour },
    });
    if (curve.low) {
      columns.push(curve.high, curve.low);
      const none = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      bands.push({ series: [series.length, series.length + 1], fill: `${curve.colour}26` });
      series.push(none, none);
    }
    tables.push(columns);
  }
  const data = tables.length ? uPlot.join(tables) : [[]];
  const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui", gap: 6 };
  const tip = h("div.tip", { hidden: true });
  const chart = new uPlot({
    width: Math.max(place.clientWidth, 120),
    height,
    legend: { show: false },
    cursor: { points: { show: !isSmall }, drag: { x: !isSmall, y: false, setScale: true }, focus: { prox: 30 } },
    focus: { alpha: 1 },
    scales: { x: { time: isTime }, y: { range: (_, low, high) => spread(low, high) } },
    axes: isSmall
      ? [{ show: false }, { ...axis, size: 46, space: 32, values: (_, ticks) => ticks.map((v) => brief(v)) }]
      : [{ ...axis, size: 28, label: xLabel, labelSize: 20, labelFont: "12px system-ui", labelGap: 0, values: isTime ? undefined : (_, ticks) => ticks.map((v) => (tellX ?? String)(v)) },
        { ...axis, size: 64, values: (_, ticks) => ticks.map(tellY) }],
    series,
    bands,
    hooks: { setCursor: [(u) => say(u)] },
  }, data, place);
  place.append(tip);

  /** The curve whose value is nearest to the cursor, and its place in the data. */
  function nearest(u) {
    let best = null;
    for (const { curve, at } of drawn) {
      const index = closest(u, at);
      if (index === null) continue;
      const distance = Math.abs(u.valToPos(data[at][index], "y") - u.cursor.top);
      if (!best || distance < best.distance) best = { curve, at, index, distance };
    }
    return best;
  }

  function closest(u, at) {
    const from = u.cursor.idx;
    if (from === null || from === undefined) return null;
    for (let far = 0; far < data[0].length; far++) {
      for (const index of [from - far, from + far]) if (data[at][index] !== null && data[at][index] !== undefined) return index;
    }
    return null;
  }

  function say(u) {
    if (isSmall || u.cursor.left < 0 || u.cursor.idx === null) {
      tip.hidden = true;
      return;
    }
    const chosen = nearest(u);
    const rows = drawn.map(({ curve, at }) => {
      const index = closest(u, at);
      if (index === null) return null;
      const deviation = curve.low ? data[at + 1][index] - data[at][index] : null;
      return h(chosen?.curve === curve ? "div.tip-row.near" : "div.tip-row", {}, h("i", { style: { background: curve.colour } }), h("span", {}, curve.name),
        h("b", {}, tellY(data[at][index]) + (deviation ? ` ± ${tellY(deviation)}` : "")));
    });
    const x = data[0][chosen?.index ?? u.cursor.idx];
    tip.replaceChildren(h("div.tip-head", {}, `${xLabel} ${isTime ? new Date(1000 * x).toLocaleTimeString() : (tellX ?? String)(x)}`), ...rows.filter(Boolean));
    tip.hidden = false;
    const left = u.over.offsetLeft + u.cursor.left;
    const isRight = left > place.clientWidth - tip.offsetWidth - 24;
    tip.style.left = `${isRight ? left - tip.offsetWidth - 12 : left + 12}px`;
    tip.style.top = `${u.over.offsetTop + 8}px`;
  }

  function open(u) {
    const chosen = nearest(u);
    if (!chosen?.curve.open) return;
    chosen.curve.open(chosen.curve.x.indexOf(data[0][chosen.index]));
  }

  if (!isSmall) {
    let pressed = null;
    chart.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    chart.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - pressed) < 4) open(chart); });
    if (curves.some((each) => each.open)) chart.over.classList.add("can-open");
    place.tabIndex = 0;
    place.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) {
        const index = Math.min(Math.max((chart.cursor.idx ?? 0) + move, 0), data[0].length - 1);
        const y = drawn.length ? data[drawn[0].at][index] : null;
        chart.setCursor({ left: chart.valToPos(data[0][index], "x"), top: y === null || y === undefined ? 0 : chart.valToPos(y, "y") });
        event.preventDefault();
      } else if (event.key === "Enter") open(chart);
    });
  }
  const watch = new ResizeObserver(() => { if (place.clientWidth) chart.setSize({ width: place.clientWidth, height }); });
  watch.observe(place);
  return () => {
    watch.disconnect();
    chart.destroy();
  };
}

/** A number where there is little room. */
function brief(value) {
  return Math.abs(value) >= 1000 ? `${num(value / 1000, 2)}k` : num(value, 2);
}

/** Some room above and below; of a curve that is flat, around it. */
function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** Means of the last `count` values, and how far these lie apart. */
export function smoothed(values, count) {
  const mean = [];
  const std = [];
  for (let at = 0; at < values.length; at++) {
    const window = values.slice(Math.max(0, at - count + 1), at + 1).filter((each) => each !== null);
    const middle = window.length ? window.reduce((a, b) => a + b, 0) / window.length : null;
    mean.push(middle);
    std.push(window.length > 1 ? Math.sqrt(window.reduce((sum, each) => sum + (each - middle) ** 2, 0) / window.length) : 0);
  }
  return { mean, std };
}

"use strict";
// A figure: one metric, drawn by uPlot, with bands under the lines and a tip at the pointer.

// Okabe and Ito's colours, which colour-blind readers can tell apart, without their yellow. The
// last one is that of the text, black on white and white on black.
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "ink"];
const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]];  // once the colours are used up

const cssColor = name => {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
};
const styleOf = index => {
  const color = COLORS[index % COLORS.length];
  return {
    color: color === "ink" ? cssColor("ink") : color,
    dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length],
  };
};

// An axis: what it writes at a tick, what a tip says of a place, and which distances ticks may have.
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 2});
const hours = (x, isLong) => isLong ? `${number(x)} h` : `${number(60 * x)} min`;
const wholes = [...Array(12).keys()].flatMap(k => [10 ** k, 2 * 10 ** k, 5 * 10 ** k]);
const AXES = {
  step: {tick: x => number(x, 10), text: x => `step ${number(x, 10)}`, incrs: wholes},
  grpo: {tick: x => number(x, 10), text: x => `GRPO step ${number(x, 10)}`, incrs: wholes},
  tokens: {tick: x => compact.format(x), text: x => `${compact.format(x)} tokens`, incrs: wholes},
  hours: {tick: hours, text: x => hours(x, x >= 2), incrs: undefined},
};

/** Draws the bands between the lowest and the highest seed, and what smoothing hides. */
const drawUnder = (plot, curves) => {
  const {ctx, bbox} = plot;
  const [px, py] = [x => plot.valToPos(x, "x", true), y => plot.valToPos(y, "y", true)];
  const bottom = plot.scales.y.min;
  const inside = y => Math.max(y, bottom);  // a log scale has no place for what is below
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const {points, raw, style} of curves) {
    if (points.low) {
      ctx.globalAlpha = 0.15;
      ctx.fillStyle = style.color;
      ctx.beginPath();
      points.x.forEach((x, i) => ctx.lineTo(px(x), py(inside(points.high[i]))));
      for (let i = points.x.length - 1; i >= 0; i--) {
        ctx.lineTo(px(points.x[i]), py(inside(points.low[i])));
      }
      ctx.fill();
    } else if (raw) {
      ctx.globalAlpha = 0.3;
      ctx.strokeStyle = style.color;
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      raw.x.forEach((x, i) => ctx.lineTo(px(x), py(raw.y[i])));
      ctx.stroke();
    }
  }
  ctx.restore();
};

/** Puts what the pointer points at into the figure's tip. */
const showTip = (plot, tip, curves, view) => {
  const found = curves[plot.focused - 1], {left, idx} = plot.cursor;
  const y = found && idx !== null && idx !== undefined ? plot.data[plot.focused][idx] : null;
  if (!found || left < 0 || y === null || y === undefined) { tip.textContent = ""; return; }
  const shown = view.percent ? `${number(100 * y)}%` : number(y);
  tip.textContent = `${found.label}: ${shown} at ${AXES[view.axis].text(plot.data[0][idx])}`;
};

/**
 * Draws curves into `box`, in the place of what is there.
 * curves: [{label, points, raw, style}]; view: {axis, isLog, percent}.
 */
const drawFigure = (box, tip, curves, view) => {
  if (box.plot) box.plot.destroy();
  box.plot = null;
  tip.textContent = "";
  box.replaceChildren();
  if (!curves.length) return;
  const [ink, line] = [cssColor("ink"), cssColor("line")];
  const font = "12px system-ui, sans-serif";
  const axis = {stroke: ink, font, grid: {stroke: line, width: 1}, ticks: {stroke: line, size: 4}};
  const ends = curves.flatMap(one => [one.points.x[0], one.points.x[one.points.x.length - 1]]);
  const [from, to] = [Math.min(...ends), Math.max(...ends)];
  const isLong = to >= 2;
  const asShown = curves.flatMap(one => one.raw ? [one.points, one.raw] : [one.points]);
  const yRange = plot => {
    const {min, max} = plot.scales.x;
    const found = extent(asShown, min ?? from, max ?? to, view.isLog);
    const range = withRoom(found || [view.isLog ? 1 : 0, 1], view.isLog);
    const isShare = view.percent && !view.isLog && found && found[0] >= 0;
    return isShare ? [0, Math.max(1.05 * found[1], 0.01)] : range;
  };
  const written = ticks => ticks.map(y => view.percent ? `${number(100 * y, 10)}%` : number(y, 10));
  const logAxis = {splits: (_, __, low, high) => logTicks(low, high), filter: (_, ticks) => ticks};
  const options = {
    width: box.clientWidth, height: box.clientHeight,
    scales: {
      x: {time: false, range: (_, min, max) => min === max ? [min - 1, max + 1] : [min, max]},
      y: {distr: view.isLog ? 3 : 1, range: yRange},
    },
    axes: [
      {...axis, values: (_, ticks) => ticks.map(x => AXES[view.axis].tick(x, isLong)),
        incrs: AXES[view.axis].incrs, space: 70, size: 30},
      {...axis, values: (_, ticks) => written(ticks), ...(view.isLog ? logAxis : {}),
        size: (plot, texts) => 16 + Math.max(20, ...(texts || []).map(text => 7 * text.length))},
    ],
    series: [{}, ...curves.map(({label, points, style}) => ({
      label, stroke: style.color, width: 1.8, dash: style.dash, spanGaps: true,
      points: {show: points.x.length === 1, size: 6, fill: style.color},
    }))],
    focus: {alpha: 0.15},
    cursor: {y: false, focus: {prox: 40}, points: {size: 6}},
    legend: {show: false},
    hooks: {
      drawAxes: [plot => drawUnder(plot, curves)],
      setSeries: [(plot, index) => { plot.focused = index; showTip(plot, tip, curves, view); }],
      setCursor: [plot => showTip(plot, tip, curves, view)],
    },
  };
  const data = uPlot.join(curves.map(({points}) => [points.x, points.y]));
  box.plot = new uPlot(options, data, box);
};

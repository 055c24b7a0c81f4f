"use strict";
// The arithmetic of the curves. It touches no page: tests/report_test.py runs it in node.
// Points are {x, y, low, high}, arrays of numbers; low and high are null without a band.

const noPoints = () => ({x: [], y: [], low: null, high: null});

/** The points whose place in `keep` is true. */
const kept = (points, keep) => {
  const pick = values => values && values.filter((_, i) => keep[i]);
  return {x: pick(points.x), y: pick(points.y), low: pick(points.low), high: pick(points.high)};
};

/** The points of a run's metric over an axis: step, grpo (without the warm start), tokens, hours. */
const pointsOf = (run, metric, axis) => {
  const table = run.tables.find(one => Object.hasOwn(one.values, metric));
  const isWarm = metric.startsWith("warm_start/");
  if (!table || (isWarm && (axis === "grpo" || axis === "tokens"))) return noPoints();
  const x = axis === "grpo" ? table.step.map(step => step - run.warm) : table[axis];
  const band = end => table.values[`${metric}_${end}`] || null;
  const all = {x, y: table.values[metric], low: band("low"), high: band("high")};
  let last = -Infinity;  // an axis must grow from point to point
  return kept(all, x.map(place => {
    const isNext = place !== null && place > last && !(axis === "grpo" && place < 0);
    if (isNext) last = place;
    return isNext;
  }));
};

/** The values at places xs, which grow and lie between the first and the last x of the points. */
const valuesAt = (points, xs) => {
  let i = 0;
  return xs.map(x => {
    while (i < points.x.length - 1 && points.x[i + 1] <= x) i += 1;
    const [x0, y0] = [points.x[i], points.y[i]];
    if (i === points.x.length - 1 || x === x0) return y0;
    return y0 + (points.y[i + 1] - y0) * (x - x0) / (points.x[i + 1] - x0);
  });
};

/** One curve of several runs: their mean, lowest and highest where all of them have values. */
const together = members => {
  if (members.length === 1) return members[0];
  if (members.some(points => !points.x.length)) {
    const others = members.filter(points => points.x.length);
    return others.length ? together(others) : noPoints();
  }
  const from = Math.max(...members.map(points => points.x[0]));
  const to = Math.min(...members.map(points => points.x[points.x.length - 1]));
  const all = new Set(members.flatMap(points => points.x));
  const x = [...all].filter(at => from <= at && at <= to).sort((a, b) => a - b);
  const values = members.map(points => valuesAt(points, x));
  const of = reduce => x.map((_, i) => reduce(values.map(one => one[i])));
  return {
    x,
    y: of(ys => ys.reduce((sum, y) => sum + y / ys.length, 0)),
    low: of(ys => Math.min(...ys)),
    high: of(ys => Math.max(...ys)),
  };
};

/** TensorBoard's smoothing: a moving average that does not lean to where it begins. */
const smooth = (values, weight) => {
  let sum = 0, weights = 0;
  return values && values.map(value => {
    sum = weight * sum + (1 - weight) * value;
    weights = weight * weights + (1 - weight);
    return sum / weights;
  });
};

const smoothed = (points, weight) => weight === 0 ? points : {
  x: points.x,
  y: smooth(points.y, weight),
  low: smooth(points.low, weight),
  high: smooth(points.high, weight),
};

/** The points that a log scale can show. */
const positive = points => kept(points, points.y.map(y => y > 0));

/** [lowest, highest] of the curves and their bands between two places of the axis, or null. */
const extent = (curves, from, to, isLog) => {
  let low = Infinity, high = -Infinity;
  for (const points of curves) {
    for (const values of [points.y, points.low, points.high]) {
      (values || []).forEach((y, i) => {
        if (points.x[i] < from || points.x[i] > to || (isLog && y <= 0)) return;
        low = Math.min(low, y);
        high = Math.max(high, y);
      });
    }
  }
  return low > high ? null : [low, high];
};

/** A range with some room at its ends. */
const withRoom = ([low, high], isLog) => {
  if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
};

/** The ticks of a log scale: 1, 2, 5 of each decade, or round numbers within one. */
const logTicks = (low, high) => {
  const decades = Math.log10(high / low), ticks = [];
  if (decades < 1) {
    const size = 10 ** Math.floor(Math.log10((high - low) / 2));
    const step = size * [5, 2, 1].find(times => (high - low) / (size * times) >= 2);
    for (let k = Math.ceil(low / step); k * step <= high; k++) ticks.push(k * step);
    return ticks;
  }
  const stride = Math.ceil(decades / 6);
  for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k += stride) {
    ticks.push(...(decades < 3 ? [1, 2, 5] : [1]).map(times => times * 10 ** k));
  }
  return ticks.filter(tick => low <= tick && tick <= high);
};

/** A number as people write it: 0.0003, 1,234. */
const number = (x, digits = 4) => {
  if (x === null || x === undefined) return "-";
  const size = Math.abs(x);
  if (size >= 1e3 && size < 1e9) {
    return x.toLocaleString("en", {maximumFractionDigits: digits > 4 ? 3 : 0});
  }
  const rounded = Number(x.toPrecision(digits));
  return (size < 1e9 ? String(rounded) : rounded.toExponential()).replace("e+", "e");
};

/** Whether a text has all words of a filter, in any order. */
const matches = (text, filter) => {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return words.every(word => text.toLowerCase().includes(word));
};

/** The order of two texts: numbers by size, then texts. What is missing comes last, both ways. */
const compared = (a, b, direction) => {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [x, y] = [Number(a), Number(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return direction * (x - y);
  if (Number.isNaN(x) !== Number.isNaN(y)) return direction * (Number.isNaN(x) - Number.isNaN(y));
  return direction * a.localeCompare(b, "en", {numeric: true});
};

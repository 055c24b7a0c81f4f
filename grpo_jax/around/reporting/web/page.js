"use strict";
// The page: which runs and metrics are shown, and how. One legend switches the runs of all figures.

const at = id => document.getElementById(id);
const make = (tag, className = "", text = undefined) => {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;  // as text, never as HTML
  return made;
};

(() => {
  const data = JSON.parse(at("data").textContent);
  const {runs, metrics} = data;
  const rows = [...at("runs").tBodies[0].rows];
  const boxOf = row => row.querySelector("input");
  const textOf = row => [...row.cells].map(cell => `${cell.dataset.name} ${cell.textContent}`).join(" ");
  const texts = new Map(rows.map(row => [row, textOf(row)]));
  const chosen = new Set(metrics.filter(metric => metric.usual).map(metric => metric.name));
  const figures = new Map();  // by the name of the metric
  let highlighted = null;

  /** The runs of the table that the filter leaves, in its order. */
  const found = () => [...at("runs").tBodies[0].rows].filter(row => !row.hidden);
  const runOf = row => runs[row.dataset.run];

  /** The entries of the legend: {label, rows, style}, one for each curve. */
  const entries = () => {
    const isTogether = at("together").checked;
    const made = new Map();
    for (const row of found()) {
      const run = runOf(row), key = isTogether ? run.series : Number(row.dataset.run);
      const label = isTogether ? data.series[run.series] : run.name;
      if (!made.has(key)) made.set(key, {label, rows: [], style: styleOf(key)});
      made.get(key).rows.push(row);
    }
    return [...made.values()];
  };

  const swatch = ({color, dash}) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "swatch");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const values = {x1: 0, x2: 26, y1: 4, y2: 4, stroke: color, "stroke-width": 3,
      "stroke-dasharray": dash.join(" ")};
    Object.entries(values).forEach(([name, value]) => line.setAttribute(name, value));
    svg.append(line);
    return svg;
  };

  /** A label whose parts, such as "learning_rate 3e-5", go to a line of their own as a whole. */
  const inParts = label => {
    const whole = make("span");
    label.split(/(?<=, )/).forEach(part => whole.append(make("span", "part", part), " "));
    return whole;
  };

  const showLegend = () => {
    at("legend").replaceChildren(...entries().map(entry => {
      const label = make("label"), box = make("input");
      const on = entry.rows.filter(row => boxOf(row).checked).length;
      box.type = "checkbox";
      box.checked = on > 0;
      box.indeterminate = on > 0 && on < entry.rows.length;
      box.onchange = () => switchRows(entry.rows, box.checked);
      label.classList.toggle("off", !on);
      label.onmouseenter = () => highlight(entry.label);
      label.onmouseleave = () => highlight(null);
      label.append(box, swatch(entry.style), inParts(entry.label));
      return label;
    }));
    for (const entry of entries()) {
      entry.rows.forEach(row => {
        row.querySelectorAll(".swatch").forEach(old => old.remove());
        boxOf(row).after(swatch(entry.style));
      });
    }
  };
  const switchRows = (some, isOn) => {
    some.forEach(row => { boxOf(row).checked = isOn; });
    showAll();
  };
  const highlight = label => {
    for (const {box} of figures.values()) {
      const index = box.labels ? box.labels.indexOf(label) : -1;
      if (box.plot && (label === null || index >= 0)) {
        box.plot.setSeries(label === null ? null : index + 1, {focus: true});
      }
    }
  };

  /** The curves of a metric, and what of it cannot be drawn. */
  const curvesOf = (metric, view) => {
    const curves = [], weight = Number(at("smooth").value);
    let notPositive = 0, leftOut = 0;
    for (const {label, rows: members, style} of entries()) {
      const shown = members.filter(row => boxOf(row).checked).map(runOf);
      if (!shown.length) continue;
      shown.forEach(run => { leftOut += Object.hasOwn(run.left_out, metric) ? run.left_out[metric] : 0; });
      const all = together(shown.map(run => pointsOf(run, metric, view.axis)));
      const full = view.isLog ? positive(all) : all;
      notPositive += all.x.length - full.x.length;
      if (!full.x.length) continue;
      const raw = weight && !full.low ? full : null;
      curves.push({label, points: smoothed(full, weight), raw, style});
    }
    const notes = [];
    if (leftOut) notes.push(`left out, not a finite number: ${leftOut}`);
    if (notPositive) notes.push(`left out of the log scale, 0 or less: ${notPositive}`);
    if (!curves.length) notes.unshift("no values to show over this axis");
    return {curves, note: notes.join("; ")};
  };

  const draw = figure => {
    figure.isDue = false;
    const {metric, box, tip, note} = figure;
    const view = {axis: at("axis").value, isLog: at("log").checked, percent: metric.percent};
    const {curves, note: said} = curvesOf(metric.name, view);
    box.labels = curves.map(curve => curve.label);
    box.style.display = curves.length ? "" : "none";
    drawFigure(box, tip, curves, view);
    note.textContent = said;
  };

  const inView = new IntersectionObserver(seen => seen.forEach(one => {
    const figure = figures.get(one.target.dataset.metric);
    if (!figure) return;
    figure.isInView = one.isIntersecting;
    if (figure.isInView && figure.isDue) draw(figure);
  }), {rootMargin: "400px"});
  const resized = new ResizeObserver(seen => seen.forEach(({target}) => {
    if (target.plot && target.clientWidth !== target.plot.width) {
      target.plot.setSize({width: target.clientWidth, height: target.clientHeight});
    }
  }));

  const makeFigure = metric => {
    const element = make("figure"), caption = make("figcaption", "", metric.title);
    const box = make("div", "plot"), tip = make("div", "tip"), note = make("p", "note muted");
    const name = metric.name === metric.title ? "" : metric.name;
    caption.append(" ", make("small", "", [metric.unit, name].filter(Boolean).join(", ")));
    element.append(caption, box, note, tip);
    element.dataset.metric = metric.name;
    inView.observe(element);
    resized.observe(box);
    return {metric, element, box, tip, note, isDue: true, isInView: false};
  };

  const showFigures = () => {
    for (const [name, figure] of figures) {
      if (chosen.has(name)) continue;
      inView.unobserve(figure.element);
      drawFigure(figure.box, figure.tip, [], {});
      figures.delete(name);
    }
    const order = metrics.filter(metric => chosen.has(metric.name));
    order.forEach(metric => {
      if (!figures.has(metric.name)) figures.set(metric.name, makeFigure(metric));
    });
    at("figures").replaceChildren(...order.map(metric => figures.get(metric.name).element));
    if (!metrics.length) at("figures").textContent = "There are no metrics yet.";
    at("chosen").textContent = `${chosen.size} of ${metrics.length}`;
    figures.forEach(figure => { figure.isDue = true; if (figure.isInView) draw(figure); });
  };

  const showTimes = () => {
    const bars = make("div", "bars"), legend = make("p", "row");
    const shown = entries().map(({label, rows: members}) => {
      const timed = members.filter(row => boxOf(row).checked).map(row => runOf(row).seconds)
        .filter(seconds => "sample" in seconds);
      return {label, timed, mean: part => timed.reduce((sum, one) => sum + one[part] / timed.length, 0)};
    }).filter(one => one.timed.length);
    const total = one => data.parts.reduce((sum, part) => sum + one.mean(part), 0);
    const longest = Math.max(...shown.map(total));
    data.parts.forEach((part, i) => {
      const chip = make("span", "", part), color = make("i", "chip");
      color.style.background = COLORS[i];
      chip.prepend(color);
      legend.append(chip);
    });
    shown.forEach(one => {
      const bar = make("div");
      data.parts.forEach((part, i) => {
        const piece = make("i");
        piece.style.cssText = `width: ${100 * one.mean(part) / longest}%; background: ${COLORS[i]}`;
        piece.title = `${part} ${number(one.mean(part), 3)} s`;
        bar.append(piece);
      });
      bars.append(inParts(one.label), bar, make("span", "", `${number(total(one), 3)} s`));
    });
    at("times").replaceChildren(...(shown.length ? [legend, bars] : ["There are no GRPO steps yet."]));
  };

  const showAll = () => {
    showLegend();
    showFigures();
    showTimes();
  };
  const filter = () => {
    rows.forEach(row => { row.hidden = !matches(texts.get(row), at("filter").value); });
    const count = found().length;
    at("count").textContent = count < rows.length ? `${count} of ${rows.length} runs` : "";
    showAll();
  };
  let sortedBy = null, direction = 1;
  const sort = column => {
    direction = sortedBy === column ? -direction : 1;
    sortedBy = column;
    const value = row => row.cells[column].dataset.value;
    const body = at("runs").tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compared(value(a), value(b), direction)));
    [...at("runs").tHead.rows[0].cells].forEach((cell, i) => {
      if (i !== column) cell.removeAttribute("aria-sort");
      else cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    });
    showAll();
  };

  const showMetrics = () => {
    at("metrics").replaceChildren(...metrics.filter(metric => {
      return matches(`${metric.name} ${metric.title}`, at("find").value);
    }).map(metric => {
      const label = make("label"), box = make("input");
      box.type = "checkbox";
      box.checked = chosen.has(metric.name);
      box.onchange = () => {
        chosen[box.checked ? "add" : "delete"](metric.name);
        showFigures();
      };
      label.append(box, ` ${metric.name}`);
      return label;
    }));
  };
  const choose = which => {
    chosen.clear();
    metrics.filter(metric => which === "all" || (which === "usual" && metric.usual))
      .forEach(metric => chosen.add(metric.name));
    showMetrics();
    showFigures();
  };

  at("filter").oninput = filter;
  at("sort").onchange = () => { sortedBy = null; sort(Number(at("sort").value)); };
  document.querySelectorAll("[data-column]").forEach(button => {
    button.onclick = () => sort(Number(button.dataset.column));
  });
  rows.forEach(row => { boxOf(row).onchange = showAll; });
  document.querySelectorAll("[data-show]").forEach(button => {
    button.onclick = () => switchRows(found(), button.dataset.show === "all");
  });
  document.querySelectorAll("[data-choose]").forEach(button => {
    button.onclick = () => choose(button.dataset.choose);
  });
  at("find").oninput = showMetrics;
  at("axis").onchange = at("log").onchange = showFigures;
  at("together").onchange = showAll;
  at("smooth").oninput = () => {
    at("smoothing").textContent = at("smooth").value;
    showFigures();
  };
  at("seeds").hidden = data.series.length === runs.length;
  const root = document.documentElement, wantsDark = matchMedia("(prefers-color-scheme: dark)");
  at("theme").onclick = () => {
    const isDark = root.style.colorScheme ? root.style.colorScheme === "dark" : wantsDark.matches;
    root.style.colorScheme = isDark ? "light" : "dark";
    showAll();
  };
  wantsDark.onchange = showAll;
  showMetrics();
  showAll();
})();

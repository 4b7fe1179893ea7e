/** Charts as SVG, drawn by hand: lines or stacked areas over time, and bars of a histogram. */

import { SPAN_S } from "./series.js";

const SVG = "http://www.w3.org/2000/svg";
const EDGE = { left: 58, right: 10, top: 8, bottom: 20 };
const GAP_S = 3.5; // without samples: the line breaks

/** Where the reader looks, the same in all charts: seconds before now, or null. */
const cursor = { ago: null, charts: [] };

export class TimeChart {
  /**
   * series: [{label, ink, value(sample) -> number or null}]; format: number -> text;
   * least: the smallest top of the scale; isStacked: areas on one another.
   */
  constructor(parent, { title, series, format, least, isStacked = false }) {
    this.series = series;
    this.format = format;
    this.least = least;
    this.isStacked = isStacked;
    this.history = null;
    this.title = title;
    const { figure, at, svg } = frame(parent, title, series);
    this.at = at;
    this.svg = svg;
    this.values = [...figure.querySelectorAll("dd")];
    this.note = figure.appendChild(element("p", "note"));
    this.note.hidden = true;
    this.listen();
    cursor.charts.push(this);
  }

  draw(history) {
    this.history = history;
    const points = history.samples.filter((s) => s.time >= history.last.time - SPAN_S);
    const rows = points.map((s) => this.series.map((one) => one.value(s.values)));
    const { width, height } = sizeOf(this.svg);
    const top = niceTop(Math.max(this.least, ...rows.map((r) => this.highest(r))), this.format);
    const x = (s) => EDGE.left + (1 - (history.last.time - s.time) / SPAN_S) * (width - EDGE.left - EDGE.right);
    const y = (v) => height - EDGE.bottom - (v / top) * (height - EDGE.top - EDGE.bottom);
    const parts = [...grid(width, y, top, this.format), ...timeLabels(width, height)];
    parts.push(...(this.isStacked ? this.areas(points, rows, x, y) : this.lines(points, rows, x, y)));
    const shown = this.shown(points);
    if (cursor.ago !== null && points[shown]) parts.push(vertical(x(points[shown]), height));
    this.svg.replaceChildren(...parts);
    this.tell(points[shown], rows[shown] ?? [], history.last.time);
  }

  highest(row) {
    const known = row.map((v) => v ?? 0);
    return this.isStacked ? known.reduce((a, b) => a + b, 0) : Math.max(...known);
  }

  lines(points, rows, x, y) {
    return this.series.map((one, k) => {
      let path = "";
      let last = null;
      points.forEach((point, i) => {
        const value = rows[i][k];
        if (value === null) return (last = null);
        const joins = last !== null && point.time - last < GAP_S;
        path += `${joins ? "L" : "M"}${x(point).toFixed(1)} ${y(value).toFixed(1)}`;
        if (!joins) path += `h0.1`; // a lone point shows as a dot
        last = point.time;
      });
      return shape("path", { d: path, class: `line ink-${one.ink}` });
    });
  }

  areas(points, rows, x, y) {
    const base = points.map(() => 0);
    return this.series.map((one, k) => {
      const lower = [...base];
      rows.forEach((row, i) => (base[i] += row[k] ?? 0));
      const runs = unbroken(points);
      const path = runs.map(([from, to]) => {
        const up = points.slice(from, to).map((p, i) => `${x(p).toFixed(1)} ${y(base[from + i]).toFixed(1)}`);
        const down = points.slice(from, to).map((p, i) => `${x(p).toFixed(1)} ${y(lower[from + i]).toFixed(1)}`);
        return `M${up.join("L")}L${down.reverse().join("L")}Z`;
      });
      return shape("path", { d: path.join(""), class: `area ink-${one.ink}` });
    });
  }

  /** The index of the sample that the legend tells. */
  shown(points) {
    if (cursor.ago === null) return points.length - 1;
    const time = this.history.last.time - cursor.ago;
    const distances = points.map((p) => Math.abs(p.time - time));
    return distances.indexOf(Math.min(...distances));
  }

  tell(point, row, now) {
    const texts = this.series.map((_, k) => this.format(row[k] ?? null));
    texts.forEach((text, k) => (this.values[k].textContent = text));
    const at = cursor.ago === null || !point ? "" : `${Math.round(now - point.time)} s ago`;
    this.at.textContent = at;
    const said = this.series.map((one, k) => `${one.label} ${texts[k]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, the last three minutes; ${at || "now"}: ${said}`);
  }

  listen() {
    this.svg.tabIndex = 0;
    const move = (ago) => {
      cursor.ago = ago === null ? null : Math.min(Math.max(ago, 0), SPAN_S);
      for (const chart of cursor.charts) if (chart.history) chart.draw(chart.history);
    };
    this.svg.addEventListener("pointermove", (event) => {
      const { width } = sizeOf(this.svg);
      move((1 - (event.offsetX - EDGE.left) / (width - EDGE.left - EDGE.right)) * SPAN_S);
    });
    this.svg.addEventListener("pointerleave", () => move(null));
    this.svg.addEventListener("blur", () => move(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: 5, ArrowRight: -5 }[event.key];
      if (event.key === "Escape") move(null);
      if (step === undefined) return;
      event.preventDefault();
      move((cursor.ago ?? 0) + step);
    });
  }
}

export class BarChart {
  /** Shares of a histogram's counts, by its buckets. `label`: of what is counted. */
  constructor(parent, { title, label, ink }) {
    this.title = title;
    this.label = label;
    const { figure, svg } = frame(parent, title, [{ label, ink }]);
    this.ink = ink;
    this.svg = svg;
    this.value = figure.querySelector("dd");
  }

  draw({ bounds, counts, sum }) {
    const total = counts.reduce((a, b) => a + b, 0);
    const { width, height } = sizeOf(this.svg);
    const [from, to] = extent(counts);
    const shown = counts.slice(from, to);
    const top = niceTop(Math.max(0.1, ...shown.map((n) => (total ? n / total : 0))), percent);
    const step = (width - EDGE.left - EDGE.right) / shown.length;
    const y = (v) => height - EDGE.bottom - (v / top) * (height - EDGE.top - EDGE.bottom);
    const parts = grid(width, y, top, percent);
    shown.forEach((number, i) => {
      const x = EDGE.left + i * step;
      const share = total ? number / total : 0;
      const name = bounds[from + i] === undefined ? `>${short(bounds.at(-1))}` : `≤${short(bounds[from + i])}`;
      const bar = shape("rect", {
        x: x + step * 0.12, width: step * 0.76, y: y(share), height: y(0) - y(share), rx: 2, class: `bar ink-${this.ink}`,
      });
      bar.appendChild(shape("title", {})).textContent = `${name} tokens: ${number} of ${total}`;
      parts.push(bar, text(name, x + step / 2, height - 5, "middle"));
    });
    this.svg.replaceChildren(...parts);
    const mean = total ? `${total.toLocaleString("en-US")}, mean ${Math.round(sum / total).toLocaleString("en-US")} tokens` : "none yet";
    this.value.textContent = mean;
    this.svg.setAttribute("aria-label", `${this.title}: ${this.label} ${mean}`);
  }
}

function frame(parent, title, series) {
  const figure = parent.appendChild(element("figure"));
  const caption = figure.appendChild(element("figcaption"));
  caption.appendChild(element("h3")).textContent = title;
  const at = caption.appendChild(element("span", "at"));
  const legend = figure.appendChild(element("dl", "legend"));
  for (const { label, ink } of series) {
    const entry = legend.appendChild(element("div", `ink-${ink}`));
    entry.appendChild(element("dt")).textContent = label;
    entry.appendChild(element("dd")).textContent = "–";
  }
  const svg = figure.appendChild(shape("svg", { class: "chart", role: "img", "aria-label": title }));
  return { figure, at, svg };
}

function grid(width, y, top, format) {
  return [0, top / 2, top].flatMap((value) => [
    shape("line", { x1: EDGE.left, x2: width - EDGE.right, y1: Math.round(y(value)), y2: Math.round(y(value)), class: "grid" }),
    text(format(value), EDGE.left - 6, y(value) + 4, "end"),
  ]);
}

function timeLabels(width, height) {
  const at = (ago) => EDGE.left + (1 - ago / SPAN_S) * (width - EDGE.left - EDGE.right);
  return [
    text("−3 min", at(180), height - 5, "start"),
    text("−2", at(120), height - 5, "middle"),
    text("−1", at(60), height - 5, "middle"),
    text("now", at(0), height - 5, "end"),
  ];
}

/** [from, to) of the samples that follow one another without a gap. */
function unbroken(points) {
  const cuts = points.flatMap((p, i) => (i && p.time - points[i - 1].time >= GAP_S ? [i] : []));
  return [0, ...cuts].map((from, i) => [from, cuts[i] ?? points.length]);
}

/** The buckets that hold anything and one more on each side; at least six. */
function extent(counts) {
  const used = counts.flatMap((n, i) => (n ? [i] : []));
  if (!used.length) return [3, 12];
  const from = Math.max(0, used[0] - 1);
  return [from, Math.min(counts.length, Math.max(used.at(-1) + 2, from + 6))];
}

/** The next 1, 1.5, 2, 3 ... 10 times a power of ten, or of two for bytes; shares end at 1. */
function niceTop(value, format) {
  const unit = /iB$/.test(format(2 ** 30)) ? 2 ** 20 * 1024 ** (value >= 1000 * 2 ** 20 ? 1 : 0) : 1;
  if (/%$/.test(format(1)) && value > 0.8) return 1;
  const size = value / unit;
  const power = 10 ** Math.floor(Math.log10(size));
  return unit * power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((n) => n * power >= size * 0.9999);
}

function percent(value) {
  return `${Math.round(value * 100)} %`;
}

function short(number) {
  return number >= 1000 ? `${number / 1000}k` : `${number}`;
}

function sizeOf(svg) {
  return { width: svg.clientWidth || 300, height: svg.clientHeight || 150 };
}

function vertical(x, height) {
  return shape("line", { x1: x, x2: x, y1: EDGE.top, y2: height - EDGE.bottom, class: "cursor" });
}

function text(content, x, y, anchor) {
  const node = shape("text", { x, y, "text-anchor": anchor });
  node.textContent = content;
  return node;
}

function shape(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function element(name, className = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  return node;
}

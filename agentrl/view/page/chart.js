// Line charts as SVG.

import { h, s, number, replace } from "./dom.js";

const WIDTH = 460, HEIGHT = 200, LEFT = 50, RIGHT = 12, TOP = 10, BOTTOM = 24;
const FEW = 10; // points that are not smoothed
export const SHADES = 8; // colours of lines, --line-0 and so on

export function ticks(low, high, count = 5, whole = false) {
  if (!(high > low)) return [low];
  const raw = Math.max((high - low) / count, whole ? 1 : 0);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((m) => m * unit).find((m) => m >= raw * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// At most `most` points: means of as many runs of neighbours, the first and the last as they are.
export function thinned(points, most) {
  if (points.length <= most) return points;
  const inner = points.slice(1, -1), runs = most - 2, found = [points[0]];
  for (let i = 0; i < runs; i++) {
    const part = inner.slice(Math.floor((i * inner.length) / runs), Math.floor(((i + 1) * inner.length) / runs));
    found.push([0, 1].map((k) => part.reduce((sum, point) => sum + point[k], 0) / part.length));
  }
  return [...found, points[points.length - 1]];
}

// Exponential moving average, its beginning corrected for the values that are not there.
export function smoothed(points, weight) {
  if (!weight || points.length < FEW) return points;
  let mean = 0, known = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    known = weight * known + (1 - weight);
    return [x, mean / known];
  });
}

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (v) => v;
  const [a, b] = [f(low), f(high)];
  return (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
}

function bounds(values, log, fixed) {
  if (fixed) return fixed;
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (!log && low >= 0 && low < high * 0.7) low = 0;
  if (low === 0 && high === 0) return [0, 1];
  if (!(high > low)) return log ? [low / 2, high * 2] : [low - Math.abs(low || 1) * 0.5, high + Math.abs(high || 1) * 0.5];
  return [low, high];
}

function logTicks(low, high) {
  const found = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const by = Math.max(1, Math.ceil((last - first) / 6));
  for (let e = first; e <= last; e += by) if (10 ** e >= low * 0.999 && 10 ** e <= high * 1.001) found.push(10 ** e);
  return found.length > 1 ? found : [low, high];
}

// The area of intervals [x, low, high]; of a single one, a bar.
function outline(band, x, y) {
  const wide = band.length > 1 ? band : [[-3, band[0]], [3, band[0]]].map(([shift, [a, low, high]]) => [a, low, high, shift]);
  const side = (k) => wide.map((one) => `${(x(one[0]) + (one[3] ?? 0)).toFixed(1)} ${y(one[k]).toFixed(1)}`);
  return `M${[...side(2), ...side(1).reverse()].join("L")}Z`;
}

// The dots where a held-out split was evaluated, and lines elsewhere.
function drawn(line, x, y) {
  const path = thinned(line.points, 2 * WIDTH).map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const style = { "--c": `var(--line-${line.shade % SHADES})` };
  const found = [];
  if (line.band?.length) found.push(s("path", { class: "band", d: outline(line.band, x, y), style }));
  if (line.raw) {
    const rough = thinned(line.raw, 2 * WIDTH).map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    found.push(s("path", { class: "raw", d: rough, style }));
  }
  found.push(s("path", { class: "line", d: path, style }));
  if (line.points.length <= 40) for (const [a, b] of line.points) found.push(s("circle", { cx: x(a), cy: y(b), r: 2.6, style }));
  return found;
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - points[low - 1][0] < points[low][0] - step ? points[low - 1] : points[low];
}

const HOVERED = new EventTarget(); // a step that the pointer is at, told to all charts

// lines: [{name, points: [[x, value]], band: [[x, low, high]] or nothing, shade}]. range: healthy [low, high], null each
// for none. axis: what x is. told: the heading, where it is more than the title.
export function chart({ title, lines, range, log = false, smooth = 0, fixed, note, axis = "step", told = h("span", null, title) }) {
  const usable = lines
    .map((line) => ({ ...line, all: line.points.filter(([, y]) => Number.isFinite(y) && (!log || y > 0)) }))
    .filter((line) => line.all.length > 0)
    .map((line) => ({ ...line, band: (line.band ?? []).filter(([, low]) => !log || low > 0), points: smoothed(line.all, smooth), raw: smooth && line.all.length >= FEW ? line.all : null }));
  if (usable.length === 0) return null;
  const steps = usable.flatMap((line) => [line.all[0][0], line.all[line.all.length - 1][0]]);
  const [least, most] = [Math.min(...steps), Math.max(...steps)];
  const [x0, x1] = most > least ? [least, most] : [least - 0.5, least + 0.5]; // a single point stands in the middle
  const [y0, y1] = bounds(usable.flatMap((line) => [...line.all.map((point) => point[1]), ...line.band.flatMap(([, low, high]) => [low, high])]), log, fixed);
  const x = scale(x0, x1, LEFT, WIDTH - RIGHT, false);
  const y = scale(y0, y1, HEIGHT - BOTTOM, TOP, log);
  const parts = [...band(range, y0, y1, y), ...axes(most > least ? [x0, x1] : [least], y0, y1, x, y, log)];
  for (const line of usable) parts.push(...drawn(line, x, y));
  const cross = s("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const label = `${title}: ${usable.map((line) => `${line.name} ${number(line.all[line.all.length - 1][1])}`).join(", ")}`;
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, parts, cross);
  const values = usable.map((line) => h("b", null, number(line.all[line.all.length - 1][1])));
  const where = h("span", { class: "at" });
  const legend = usable.map((line, i) =>
    h("span", null, h("i", { style: { background: `var(--line-${line.shade % SHADES})` } }), line.name, " ", values[i]));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const step = x0 + ((at - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0);
    HOVERED.dispatchEvent(new CustomEvent("step", { detail: Math.min(x1, Math.max(x0, step)) }));
  });
  svg.addEventListener("pointerleave", () => HOVERED.dispatchEvent(new CustomEvent("step", { detail: null })));
  const figure = h("figure", { class: "chart" }, h("figcaption", null, told, note, where), svg, h("div", { class: "legend" }, legend));
  const follow = ({ detail }) => {
    if (!figure.isConnected) return HOVERED.removeEventListener("step", follow);
    cross.setAttribute("visibility", detail === null || detail < x0 || detail > x1 ? "hidden" : "visible");
    if (detail === null) {
      usable.forEach((line, i) => replace(values[i], number(line.all[line.all.length - 1][1])));
      return replace(where, "");
    }
    const at = nearest(usable[0].all, detail)[0];
    cross.setAttribute("x1", x(at));
    cross.setAttribute("x2", x(at));
    replace(where, `${axis} ${number(at, axis === "step" ? 9 : 4)}`);
    usable.forEach((line, i) => {
      const [place, value] = nearest(line.all, at);
      const interval = line.band.find(([one]) => one === place);
      replace(values[i], number(value, 4), interval && h("span", { class: "soft" }, ` ${number(interval[1])} to ${number(interval[2])}`));
    });
  };
  HOVERED.addEventListener("step", follow);
  return figure;
}

function band(range, y0, y1, y) {
  if (!range) return [];
  const low = Math.max(range[0] ?? y0, y0), high = Math.min(range[1] ?? y1, y1);
  const found = [];
  if (high > low) found.push(s("rect", { class: "healthy", x: LEFT, width: WIDTH - LEFT - RIGHT, y: y(high), height: y(low) - y(high) }));
  for (const edge of range) {
    if (edge !== null && edge >= y0 && edge <= y1) found.push(s("line", { class: "edge", x1: LEFT, x2: WIDTH - RIGHT, y1: y(edge), y2: y(edge) }));
  }
  return found;
}

function axes(ends, y0, y1, x, y, log) {
  const found = [];
  for (const value of log ? logTicks(y0, y1) : ticks(y0, y1, 4)) {
    found.push(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    found.push(s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  const [x0, x1] = ends;
  for (const value of x1 === undefined ? [x0] : ticks(x0, x1, 6, x1 - x0 >= 6)) {
    found.push(s("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, number(value, x1 - x0 >= 6 ? 9 : 4)));
  }
  return found;
}

// Accuracies with their intervals on a scale from 0 to 1. marks: [{value, low, high, kind}].
export function interval(marks, label) {
  const x = (value) => 4 + value * 272;
  const parts = [s("line", { class: "grid", x1: 4, x2: 276, y1: 14, y2: 14 })];
  for (const value of [0, 0.25, 0.5, 0.75, 1]) parts.push(s("line", { class: "grid", x1: x(value), x2: x(value), y1: 11, y2: 17 }));
  marks.forEach(({ value, low, high, kind }, i) => {
    const y = marks.length > 1 ? 7 + (14 * i) / (marks.length - 1) : 14;
    if (low !== undefined && low !== null) parts.push(s("line", { class: `whisker ${kind}`, x1: x(low), x2: x(high), y1: y, y2: y }));
    parts.push(s("circle", { class: kind, cx: x(value), cy: y, r: 4 }));
  });
  return s("svg", { viewBox: "0 0 280 28", class: "interval", role: "img", "aria-label": label }, parts);
}

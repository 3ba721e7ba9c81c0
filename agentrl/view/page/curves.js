// Every metric of every run.

import { h, replace, later } from "./dom.js";
import { chart } from "./chart.js";

// The healthy range of a metric; names of ranges may hold parts such as <tool>.
export function rangeOf(ranges, key) {
  if (ranges[key]) return ranges[key];
  for (const [name, range] of Object.entries(ranges)) {
    if (!name.includes("<")) continue;
    const pattern = name.split(/<[^>]*>/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("[^/]+");
    if (new RegExp(`^${pattern}$`).test(key)) return range;
  }
  return null;
}

function keysOf(runs) {
  const keys = new Set();
  for (const run of runs) for (const key of run.series.keys()) keys.add(key);
  const groups = new Map();
  for (const key of [...keys].sort()) {
    const group = key.includes("/") ? key.slice(0, key.indexOf("/")) : "other";
    groups.set(group, [...(groups.get(group) ?? []), key]);
  }
  const first = ["reward", "eval", "train", "rollout", "groups", "mismatch"];
  const place = (name) => (first.includes(name) ? first.indexOf(name) : first.length);
  return [...groups].sort((a, b) => place(a[0]) - place(b[0]) || (a[0] < b[0] ? -1 : 1));
}

function outside(range, lines) {
  if (!range) return false;
  return lines.some(({ points }) => {
    const value = points.length ? points[points.length - 1][1] : null;
    return value !== null && ((range[0] !== null && value < range[0]) || (range[1] !== null && value > range[1]));
  });
}

export function curvesView(app, params) {
  const state = { text: params.q ?? "", smooth: Number(params.smooth ?? 0), log: params.log === "1", constant: params.constant === "1" };
  const body = h("div");
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "400px" });
  const slots = new Map(); // element -> key
  let drawn = "";

  function draw(slot) {
    const key = slots.get(slot);
    const lines = app.runs.map((run, shade) => ({ name: app.runs.length > 1 ? run.name : "", shade, points: run.series(key) })).filter((line) => line.points.length);
    const range = rangeOf(app.about.ranges, key);
    const note = outside(range, lines) ? h("span", { class: "bad" }, " outside of its healthy range") : null;
    const figure = chart({ title: key, lines, range, log: state.log, smooth: state.smooth, note });
    replace(slot, figure ?? h("figure", { class: "chart" }, h("figcaption", null, key), h("p", { class: "soft" }, "no positive value")));
    seen.unobserve(slot);
  }

  function update() {
    const wanted = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (key) => wanted.every((word) => key.toLowerCase().includes(word));
    seen.disconnect();
    slots.clear();
    let constant = 0;
    const varies = (key) => {
      const varied = app.runs.some((run) => {
        const points = run.series(key);
        return points.length === 1 || points.some((point) => point[1] !== points[0][1]);
      });
      constant += varied ? 0 : 1;
      return varied || state.constant || wanted.length > 0;
    };
    const groups = keysOf(app.runs.map((run) => ({ series: run.all() }))).map(([name, keys]) => [name, keys.filter((key) => fits(key) && varies(key))]).filter(([, keys]) => keys.length);
    const layout = JSON.stringify([groups, constant]);
    if (layout === drawn && groups.length) { // only the values are new
      for (const slot of body.querySelectorAll(".slot")) seen.observe(slots.set(slot, slot.dataset.key) && slot);
      return;
    }
    drawn = layout;
    replace(body, groups.length ? groups.map(([name, keys]) => h("section", null, h("h2", null, name), h("div", { class: "charts" }, keys.map((key) => {
      const slot = h("div", { class: "slot", "data-key": key });
      slots.set(slot, key);
      return slot;
    })))) : h("p", { class: "empty" }, app.runs.every((run) => run.rows.length === 0) ? "No step is whole yet." : "No metric is named so."));
    if (constant && !wanted.length) body.append(h("p", { class: "soft" }, state.constant ? "" : `${constant} metrics never change and are not drawn. `,
      h("button", { onclick: () => change({ constant: !state.constant }) }, state.constant ? "Leave out what never changes" : "Draw them too")));
    for (const slot of slots.keys()) seen.observe(slot);
  }

  function change(given) {
    Object.assign(state, given);
    app.remember({ q: state.text, smooth: state.smooth || "", log: state.log ? 1 : "", constant: state.constant ? 1 : "" });
    update();
  }

  const box = h("input", { type: "search", value: state.text, placeholder: "filter metrics", "aria-label": "filter metrics", oninput: later(80, () => change({ text: box.value })) });
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "smoothing", oninput: later(30, () => change({ smooth: Number(slider.value) })) });
  const log = h("input", { type: "checkbox", checked: state.log, onchange: () => change({ log: log.checked }) });
  const legend = app.runs.length > 1 && h("div", { class: "legend" }, app.runs.map((run, i) => h("span", null, h("i", { style: { background: `var(--line-${i % 8})` } }), run.name)));
  const element = h("div", { class: "view" }, h("h1", { class: "hidden" }, "Curves"), h("div", { class: "bar" }, box, h("label", { class: "field" }, h("span", null, "smoothing"), slider), h("label", { class: "tick" }, log, "log scale"), legend), body);
  update();
  return { element, title: "Curves", update, search: box, close: () => seen.disconnect() };
}

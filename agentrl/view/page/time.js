// Where the time of a step went, sample by sample.

import { h, LongList, choice, replace, seconds } from "./dom.js";

const LANES = ["engine", "tools", "environment", "hooks"];

export function timeView(app, params) {
  const state = { ...params };
  const list = new LongList(24, row, { tabindex: 0, role: "list", "aria-label": "samples" });
  const bar = h("div", { class: "bar" });
  const told = h("div");
  const { samples } = app;
  let shown = [], longest = 1;

  function row(index) {
    const i = shown[index];
    const { column } = samples;
    const total = column.total_s[i] ?? 0;
    let known = 0;
    const parts = LANES.map((name) => {
      const value = column[`${name}_s`][i] ?? 0;
      known += value;
      return h("i", { class: name, style: { width: `${(100 * value) / longest}%` }, title: `${name} ${seconds(value)}` });
    });
    const waiting = Math.max(0, total - known);
    parts.push(h("i", { class: "waiting", style: { width: `${(100 * waiting) / longest}%` }, title: `waiting ${seconds(waiting)}` }));
    return h("div", { class: "lane", role: "listitem" }, h("a", { href: app.linkOf(i) }, `${column.task[i]} #${column.sample[i] ?? 0}`), h("span", { class: "track" }, parts), h("span", { class: "number" }, seconds(total)));
  }

  function files() {
    return app.runs.flatMap((run, i) => run.state.files.filter((file) => file.step >= 0).map((file) => [`${i}\n${file.name}`, `${app.runs.length > 1 ? `${run.name}, ` : ""}${file.split}, step ${file.step}`, file.step, i])).sort((a, b) => a[3] - b[3] || b[2] - a[2]);
  }

  function update() {
    const there = files();
    const now = there.find(([key]) => key === state.of) ?? there[0];
    replace(bar, there.length ? choice("step", there.map(([key, text]) => [key, text]), now?.[0], (value) => change({ of: value })) : "",
      choice("order", [["", "longest first"], ["group", "by task"]], state.order, (value) => change({ order: value })));
    const { column } = samples;
    shown = now ? samples.where((i) => `${column.run[i]}\n${column.file[i]}` === now[0] && column.total_s[i] !== null) : [];
    if (state.order !== "group") shown.sort((a, b) => column.total_s[b] - column.total_s[a]);
    longest = shown.reduce((most, i) => Math.max(most, column.total_s[i]), 0) || 1;
    const sums = [...LANES, "total"].map((name) => shown.reduce((sum, i) => sum + (column[`${name}_s`][i] ?? 0), 0));
    const all = sums.pop();
    const waiting = Math.max(0, all - sums.reduce((a, b) => a + b, 0));
    const parts = [...LANES.map((name, k) => [name, sums[k]]), ["waiting", waiting]];
    replace(told, shown.length === 0 ? h("p", { class: "empty" }, app.ready ? "No times are stored." : "Reading…") : [
      h("div", { class: "legend" }, parts.map(([name, value]) => h("span", null, h("i", { class: name }), name, " ", h("b", null, `${seconds(value)}, ${((100 * value) / (all || 1)).toFixed(1)} %`)))),
      h("p", { class: "soft" }, `${shown.length} samples, ${seconds(longest)} the longest. Each bar is one sample: how long it took in all, by what it waited for. When each part began is not stored, so bars begin at the left. Waiting is for its turn, and what no part covers.`)]);
    list.reset(shown.length);
  }

  function change(given) {
    Object.assign(state, given);
    app.remember(state);
    update();
  }

  const element = h("div", { class: "view full" }, h("h1", { class: "hidden" }, "Time"), bar, told, list.element);
  update();
  return { element, title: "Time", update, close: () => list.sizes.disconnect() };
}

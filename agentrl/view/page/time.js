// Where the time of a step went, sample by sample.

import { h, LongList, choice, replace, seconds } from "./dom.js";
import { ticks } from "./chart.js";

const LANES = ["engine", "tools", "environment", "hooks"];

export function timeView(app, params) {
  const state = { ...params };
  const list = new LongList(24, row, { tabindex: 0, role: "list", "aria-label": "samples" });
  const bar = h("div", { class: "bar" });
  const told = h("div");
  const axis = h("div", { class: "lane axis", "aria-hidden": "true" });
  const { samples } = app;
  let shown = [], longest = 1, spans = null, spansOf = "";

  const known = (i) => spans?.[samples.column.row[i]] ?? null;
  const begin = (i) => (known(i) ?? []).reduce((least, span) => Math.min(least, span[1]), Infinity);
  const end = (i) => (known(i) ?? []).reduce((most, span) => Math.max(most, span[2]), 0);
  const share = (value) => `${(100 * value) / longest}%`;

  // Bars where each part began, on the clock of the step.
  function placed(i) {
    const from = begin(i);
    const all = h("i", { class: "waiting", style: { left: share(from), width: share(end(i) - from) }, title: "waiting" });
    return [all, known(i).map(([part, start, stop]) => h("i", { class: LANES.includes(part) ? part : "waiting", style: { left: share(start), width: share(stop - start) }, title: `${part} ${seconds(stop - start)}, from ${seconds(start)}` }))];
  }

  // Bars one after another, where it is not known when they began.
  function stacked(i) {
    const { column } = samples;
    let at = 0;
    const one = (name, value) => {
      const found = h("i", { class: name, style: { left: share(at), width: share(value) }, title: `${name} ${seconds(value)}` });
      at += value;
      return found;
    };
    const parts = LANES.map((name) => one(name, column[`${name}_s`][i] ?? 0));
    return [parts, one("waiting", Math.max(0, (column.total_s[i] ?? 0) - at))];
  }

  function row(index) {
    const i = shown[index];
    const { column } = samples;
    return h("div", { class: "lane", role: "listitem" }, h("a", { href: app.linkOf(i) }, `${column.task[i]} #${column.sample[i] ?? 0}`), h("span", { class: "track" }, known(i) ? placed(i) : stacked(i)), h("span", { class: "number" }, seconds(column.total_s[i])));
  }

  function files() {
    return app.runs.flatMap((run, i) => run.state.files.filter((file) => file.step >= 0).map((file) => ({ run: i, file, key: `${i}\n${file.name}`,
      text: `${app.runs.length > 1 ? `${run.name}, ` : ""}${file.split}, step ${file.step}` }))).sort((a, b) => a.run - b.run || b.file.step - a.file.step);
  }

  function ordered(rows) {
    const { column } = samples;
    if (state.order === "longest") return rows.sort((a, b) => column.total_s[b] - column.total_s[a]);
    if (state.order !== "task" && spans) return rows.map((i) => [begin(i), i]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, i]) => i);
    return rows;
  }

  function draw(now) {
    const { column } = samples;
    shown = now ? ordered(samples.where((i) => `${column.run[i]}\n${column.file[i]}` === now.key && column.total_s[i] !== null)) : [];
    const placedAll = shown.some(known);
    longest = shown.reduce((most, i) => Math.max(most, known(i) ? end(i) : column.total_s[i]), 0) || 1;
    const sums = LANES.map((name) => [name, shown.reduce((sum, i) => sum + (column[`${name}_s`][i] ?? 0), 0)]);
    const all = shown.reduce((sum, i) => sum + column.total_s[i], 0) || 1;
    sums.push(["waiting", Math.max(0, all - sums.reduce((sum, [, value]) => sum + value, 0))]);
    replace(told, shown.length === 0 ? h("p", { class: "empty" }, app.ready ? "No times are stored." : "Reading…") : [
      h("div", { class: "legend" }, sums.map(([name, value]) => h("span", null, h("i", { class: name }), name, " ", h("b", null, `${seconds(value)}, ${((100 * value) / all).toFixed(1)} %`)))),
      h("p", { class: "soft" }, `${shown.length} samples. `, placedAll ? "Each bar is one sample on the clock of the step: whom it waited for, and when. Waiting is for its turn, and what nothing else covers."
        : "Each bar is one sample: how long it waited for whom. When each part began is not stored in this file, so all bars begin at the left.")]);
    replace(axis, h("span"), h("span", { class: "track" }, shown.length ? ticks(0, longest, innerWidth < 700 ? 2 : 6).map((value) => h("span", { style: { left: share(value) } }, seconds(value))) : ""), h("span", { class: "number" }, "in all"));
    list.reset(shown.length);
  }

  async function update() {
    const there = files();
    const now = there.find(({ key }) => key === state.of) ?? there[0];
    replace(bar, there.length ? choice("step", there.map(({ key, text }) => [key, text]), now?.key, (of) => change({ of })) : "",
      choice("order", [["", "as they began"], ["longest", "longest first"], ["task", "by task"]], state.order, (order) => change({ order })));
    const facing = now ? `${now.key}\n${now.file.version}` : "";
    if (facing && facing !== spansOf) {
      spansOf = facing;
      spans = null;
      const found = await app.source.spans(now.run, now.file.name).catch(() => []); // a damaged file has no rows either
      if (spansOf !== facing) return;
      spans = found.some(Boolean) ? found : null;
    }
    draw(now);
  }

  function change(given) {
    Object.assign(state, given);
    app.remember(state);
    update();
  }

  const element = h("div", { class: "view full" }, h("h1", { class: "hidden" }, "Time"), bar, told, axis, list.element);
  update();
  return { element, title: "Time", update, close: () => list.sizes.disconnect() };
}

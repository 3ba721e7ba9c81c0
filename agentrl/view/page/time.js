// Where the time of a step went, sample by sample.

import { h, LongList, choice, replace, seconds } from "./dom.js";
import { ticks } from "./chart.js";

const LANES = ["engine", "tools", "environment", "hooks"];
const PHASES = ["rollout", "update", "sync", "save"]; // of a step, and `evaluation SPLIT`; others are named by `agentrl.span`
const MOST_LANES = 16; // of a step

export function timeView(app, params) {
  const state = { ...params };
  const steps = h("div", { class: "gutter", role: "list", "aria-label": "the step" });
  const list = new LongList(24, row, { tabindex: 0, role: "list", "aria-label": "samples" });
  const bar = h("div", { class: "bar" });
  const told = h("div");
  const axis = h("div", { class: "lane axis gutter", "aria-hidden": "true" });
  const { samples } = app;
  let shown = [], longest = 1, spans = null, spansOf = "", zero = 0, from = 0;

  const known = (i) => spans?.[samples.column.row[i]] ?? null;
  const begin = (i) => (known(i) ?? []).reduce((least, span) => Math.min(least, span[1]), Infinity);
  const end = (i) => (known(i) ?? []).reduce((most, span) => Math.max(most, span[2]), 0);
  const share = (value) => `${(100 * value) / longest}%`;
  const place = (value) => share(value - from);

  // Bars where each part began, on the clock of the step.
  function placed(i) {
    const first = begin(i);
    const all = h("i", { class: "waiting", style: { left: place(first), width: share(end(i) - first) }, title: "waiting" });
    const own = (part) => !LANES.includes(part);
    const sorted = [...known(i)].sort((a, b) => own(a[0]) - own(b[0])); // what plugins named stands over the parts
    return [all, sorted.map(([part, start, stop]) => h("i", { class: own(part) ? "named" : part, style: { left: place(start), width: share(stop - start) }, title: `${part} ${seconds(stop - start)}, from ${seconds(start)}` }))];
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

  // The spans of the step that a file is of, in seconds since `zero`; of an evaluation, those within its time.
  function ofStep(now) {
    const row = now && app.runs[now.run].rows.findLast((one) => one.step === now.file.step);
    const given = Array.isArray(row?.["time/spans"]) ? row["time/spans"].filter((one) => Array.isArray(one) && typeof one[0] === "string" && Number.isFinite(one[1]) && Number.isFinite(one[2])) : [];
    const placed = given.map(([name, start, stop]) => [name, start - zero, stop - zero]);
    const last = shown.reduce((most, i) => Math.max(most, end(i)), 0);
    return now?.file.evaluation ? placed.filter(([, start, stop]) => stop >= 0 && start <= last) : placed;
  }

  function lanes(found) {
    const byName = Map.groupBy(found, ([name]) => name);
    const phase = (name) => PHASES.includes(name) || name.startsWith("evaluation ");
    const order = [...byName].sort((a, b) => phase(b[0]) - phase(a[0]) || a[1][0][1] - b[1][0][1]).slice(0, MOST_LANES);
    return order.map(([name, each]) => h("div", { class: "lane", role: "listitem" }, h("b", null, name), h("span", { class: "track" },
      each.map(([, start, stop]) => h("i", { class: phase(name) ? "phase" : "named", style: { left: place(start), width: share(stop - start) }, title: `${name} ${seconds(stop - start)}, from ${seconds(start - from)}` }))),
      h("span", { class: "number" }, seconds(each.reduce((sum, [, start, stop]) => sum + stop - start, 0)))));
  }

  function draw(now) {
    const { column } = samples;
    shown = now ? ordered(samples.where((i) => `${column.run[i]}\n${column.file[i]}` === now.key && column.total_s[i] !== null)) : [];
    const placedAll = shown.some(known);
    const step = placedAll || !shown.length ? ofStep(now) : [];
    from = step.reduce((least, [, start]) => Math.min(least, start), shown.length ? 0 : Infinity);
    from = Number.isFinite(from) ? from : 0;
    longest = step.reduce((most, [, , stop]) => Math.max(most, stop - from), shown.reduce((most, i) => Math.max(most, known(i) ? end(i) - from : column.total_s[i]), 0)) || 1;
    replace(steps, lanes(step));
    const sums = LANES.map((name) => [name, shown.reduce((sum, i) => sum + (column[`${name}_s`][i] ?? 0), 0)]);
    const all = shown.reduce((sum, i) => sum + column.total_s[i], 0) || 1;
    sums.push(["waiting", Math.max(0, all - sums.reduce((sum, [, value]) => sum + value, 0))]);
    const named = new Map(); // what plugins named: name -> seconds over all samples
    for (const i of placedAll ? shown : []) for (const [part, start, stop] of known(i) ?? []) if (!LANES.includes(part)) named.set(part, (named.get(part) ?? 0) + stop - start);
    replace(told, shown.length === 0 ? h("p", { class: "empty" }, app.ready ? "No times are stored." : "Reading…") : [
      h("div", { class: "legend" }, sums.map(([name, value]) => h("span", null, h("i", { class: name }), name, " ", h("b", null, `${seconds(value)}, ${((100 * value) / all).toFixed(1)} %`))),
        [...named].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([name, value]) => h("span", null, h("i", { class: "named" }), name, " ", h("b", null, seconds(value))))),
      h("p", { class: "soft" }, `${shown.length} samples. `, placedAll ? "Each bar is one sample on the clock of the step: whom it waited for, and when. Waiting is for its turn, and what nothing else covers. Above stand the parts of the step, and what agentrl.span names."
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
      const found = await app.source.spans(now.run, now.file.name).catch(() => ({ zero: 0, rows: [] })); // a damaged file has no rows either
      if (spansOf !== facing) return;
      zero = found.zero;
      spans = found.rows.some(Boolean) ? found.rows : null;
    }
    draw(now);
  }

  function change(given) {
    Object.assign(state, given);
    app.remember(state);
    update();
  }

  const element = h("div", { class: "view full" }, h("h1", { class: "hidden" }, "Time"), bar, told, axis, steps, list.element);
  update();
  return { element, title: "Time", update, close: () => list.sizes.disconnect() };
}

// Every sample of every step and split: a table to filter and sort.

import { h, LongList, choice, number, replace, seconds, later } from "./dom.js";

const ROW = 30; // pixels
// [key, heading, width, priority on narrow screens (1: always), how a value is written]
const SHOWN = [
  ["mark", "", "2rem", 1],
  ["step", "step", "3rem", 1],
  ["split", "split", "5.5rem", 2],
  ["task", "task", "8rem", 2],
  ["prompt", "prompt", "minmax(9rem, 1fr)", 1],
  ["reward", "reward", "4rem", 1],
  ["advantage", "adv.", "3.6rem", 3],
  ["finish", "finish", "5.5rem", 2],
  ["turns", "turns", "3rem", 3],
  ["tool_errors", "errors", "3.6rem", 3],
  ["tokens", "tokens", "4rem", 3],
  ["total_s", "time", "4.4rem", 3],
];
const OUTCOMES = [["", "all"], ["solved", "solved"], ["unsolved", "unsolved"], ["failed", "failed (machinery)"], ["untrained", "not trained on"], ["branched", "branched"]];
const NUMBERS = new Set(["step", "reward", "advantage", "turns", "calls", "tool_errors", "tokens", "sampled_tokens", "total_s", "engine_s", "tools_s", "environment_s", "hooks_s", "group", "sample", "branches"]);
const ALIASES = { errors: "tool_errors", time: "total_s", seconds: "total_s", length: "tokens" };
const TERM = /([\w.]+)(<=|>=|:|=|<|>)("[^"]*"|\S+)|"([^"]*)"|(\S+)/g;

const TESTS = {
  ":": (a, b) => String(a).toLowerCase() === b.toLowerCase(),
  "=": (a, b) => String(a).toLowerCase() === b.toLowerCase(),
  "<": (a, b) => typeof a === "number" && a < Number(b),
  ">": (a, b) => typeof a === "number" && a > Number(b),
  "<=": (a, b) => typeof a === "number" && a <= Number(b),
  ">=": (a, b) => typeof a === "number" && a >= Number(b),
};

// What was typed: conditions on columns and task fields, and a text to look for in the conversations.
export function parsed(text, samples) {
  const conditions = [], words = [];
  for (const m of text.matchAll(TERM)) {
    const name = ALIASES[m[1]] ?? m[1];
    const value = m[3]?.replace(/^"(.*)"$/, "$1");
    if (name !== undefined && (Object.hasOwn(samples.column, name) || samples.fields.has(name))) conditions.push([name, m[2], value]);
    else words.push(m[4] ?? m[5] ?? m[0]);
  }
  return { conditions, text: words.join(" ") };
}

function solved(column, i) {
  return column.boundary[i] === null ? column.solved[i] : null;
}

function outcomeTest(outcome, column) {
  if (outcome === "solved") return (i) => solved(column, i) === true;
  if (outcome === "unsolved") return (i) => solved(column, i) === false;
  if (outcome === "failed") return (i) => column.boundary[i] !== null;
  if (outcome === "untrained") return (i) => column.left_out[i] !== null;
  if (outcome === "branched") return (i) => column.branches[i] > 0;
  return null;
}

export function chosen(samples, filter, hits) {
  const { column } = samples;
  const tests = [outcomeTest(filter.outcome, column)].filter(Boolean);
  for (const name of ["run", "split", "finish", "environment"]) {
    if (filter[name] !== undefined && filter[name] !== "") tests.push((i) => String(column[name][i]) === filter[name]);
  }
  if (filter.errors === "yes") tests.push((i) => column.tool_errors[i] > 0);
  if (filter.errors === "no") tests.push((i) => column.tool_errors[i] === 0);
  if (filter.step) {
    const [low, high = low] = filter.step.split("-").map(Number);
    tests.push((i) => column.step[i] !== null && column.step[i] >= low && column.step[i] <= high);
  }
  for (const [name, sign, value] of parsed(filter.q ?? "", samples).conditions) {
    if (name === "scan") { // names of scanners that found something
      tests.push((i) => (column.scan[i] ?? "").split(" ").includes(value));
      continue;
    }
    const test = TESTS[sign];
    const values = column[name];
    tests.push(values ? (i) => test(values[i], value) : (i) => test(samples.data(i)[name], value));
  }
  if (hits) tests.push((i) => hits.has(i));
  const found = [];
  for (const i of samples.sorted(filter.sort === "mark" ? "solved" : filter.sort === "-mark" ? "-solved" : (filter.sort ?? ""))) {
    let fits = true;
    for (let k = 0; k < tests.length && fits; k++) fits = tests[k](i);
    if (fits) found.push(i);
  }
  return found;
}

export function mark(column, i) {
  if (column.boundary[i] !== null) return h("span", { class: "bad", title: `failed: ${column.boundary[i]}`, role: "img", "aria-label": "failed" }, "!");
  if (column.solved[i] === null) return "";
  return column.solved[i] ? h("span", { class: "good", role: "img", "aria-label": "solved" }, "✓") : h("span", { class: "bad", role: "img", "aria-label": "unsolved" }, "✗");
}

const WRITTEN = {
  reward: (v) => (v === null ? "none" : number(v)),
  advantage: (v) => (v === null ? "" : `${v > 0 ? "+" : ""}${number(v)}`),
  total_s: seconds,
  step: (v) => (v === null ? "…" : String(v)),
};

export function samplesView(app, params) {
  const filter = { ...params };
  let at = -1;
  let hits = null;
  const { samples } = app;
  const list = new LongList(ROW, row, { tabindex: 0, role: "rowgroup", "aria-label": "samples" });
  const count = h("span", { class: "soft", role: "status" });
  const head = h("div", { class: "row head", role: "row" });
  const bar = h("div", { class: "bar" });
  const box = h("input", { type: "search", class: "wide", value: filter.q ?? "", placeholder: "text, or reward<1 kind:trip tokens>200", "aria-label": "search conversations", oninput: later(200, () => change({ q: box.value })) });
  const template = () => SHOWN.map(([, , width]) => width).join(" ");
  const prompts = new Map(); // "run\nfile" -> task -> text, or a promise of it

  const place = (i) => `${samples.column.run[i]}\n${samples.column.file[i]}`;

  function prompt(i) {
    const known = prompts.get(place(i));
    if (known === undefined) ask();
    return known?.[samples.column.task[i]] ?? "";
  }

  // Ask for the prompts of the rows in sight, once they stay in sight for a moment.
  const ask = later(60, () => {
    for (const i of new Set([...list.shown.keys()].map((index) => app.list[index]))) {
      const key = place(i);
      if (i === undefined || prompts.has(key)) continue;
      prompts.set(key, {});
      app.source.previews(samples.column.run[i], samples.column.file[i]).then((found) => {
        prompts.set(key, found);
        for (const [index, element] of list.shown) {
          const k = app.list[index];
          if (k !== undefined && place(k) === key) replace(element.querySelector(".prompt .text"), found[samples.column.task[k]] ?? "");
        }
      }).catch(() => {}); // the file's error is said beside the table
    }
  });

  function row(index) {
    const i = app.list[index];
    const { column } = samples;
    const cells = SHOWN.map(([key, , , priority]) => {
      const link = () => h("a", { href: app.linkOf(i), tabindex: -1, "aria-label": `conversation of ${column.task[i]}` }, h("span", { class: "text" }, prompt(i)));
      const inside = key === "mark" ? mark(column, i) : key === "prompt" ? link() : (WRITTEN[key] ?? ((v) => (v === null ? "" : String(v))))(column[key][i]);
      return h("span", { role: "cell", class: `p${priority} ${key === "prompt" ? key : ""}${NUMBERS.has(key) ? " number" : ""}` }, inside);
    });
    return h("div", { class: `row${index === at ? " at" : ""}`, role: "row", "aria-rowindex": index + 2 }, cells);
  }

  function heading([key, text, , priority]) {
    if (key === "prompt") return h("span", { role: "columnheader", class: `p${priority}` }, text);
    const order = filter.sort === key ? "ascending" : filter.sort === `-${key}` ? "descending" : "none";
    const arrow = { ascending: " ↑", descending: " ↓", none: "" }[order];
    const turn = () => change({ sort: filter.sort === key ? `-${key}` : filter.sort === `-${key}` ? "" : key });
    return h("span", { role: "columnheader", "aria-sort": order, class: `p${priority}${NUMBERS.has(key) ? " number" : ""}` }, h("button", { class: "plain", onclick: turn, "aria-label": `sort by ${text || "outcome"}` }, text || "✓", arrow));
  }

  function distinct(name) {
    return [...new Set(samples.column[name])].filter((v) => v !== null && v !== "").map(String).sort();
  }

  function options(name) {
    return [["", "all"], ...distinct(name).map((value) => [value, value])];
  }

  function controls() {
    const focused = bar.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const set = (name) => (value) => change({ [name]: value });
    const found = [box];
    if (app.runs.length > 1) found.push(choice("run", [["", "all"], ...app.runs.map((run, i) => [String(i), run.name])], filter.run, set("run")));
    found.push(choice("split", options("split"), filter.split, set("split")));
    const steps = [...new Set(samples.column.step)].filter((v) => v !== null && v !== undefined).sort((a, b) => a - b);
    found.push(choice("step", [["", "all"], ...steps.map((v) => [String(v), String(v)])], filter.step, set("step")));
    found.push(choice("outcome", OUTCOMES, filter.outcome, set("outcome")));
    found.push(choice("finish", options("finish"), filter.finish, set("finish")));
    found.push(choice("tool errors", [["", "all"], ["yes", "some"], ["no", "none"]], filter.errors, set("errors")));
    if (distinct("environment").length > 1) found.push(choice("environment", options("environment"), filter.environment, set("environment")));
    const scans = [...new Set(samples.column.scan.flatMap((one) => (one ? one.split(" ") : [])))].sort();
    if (scans.length) {
      const now = scans.find((name) => ` ${filter.q ?? ""} `.includes(` scan:${name} `)) ?? "";
      found.push(choice("scanner", [["", "all"], ...scans.map((name) => [name, name])], now, (value) => {
        const kept = ` ${filter.q ?? ""} `.replace(` scan:${now} `, " ").trim();
        box.value = [kept, value && `scan:${value}`].filter(Boolean).join(" ");
        change({ q: box.value });
      }));
    }
    const fields = [...samples.fields].filter(([, values]) => values.size > 1 && values.size <= 40);
    if (fields.length) {
      const choices = fields.flatMap(([name, values]) => [...values].map(String).sort().map((v) => [`${name}:${/\s/.test(v) ? `"${v}"` : v}`, `${name}: ${v}`]));
      const now = (filter.q ?? "").split(/\s+(?=(?:[^"]*"[^"]*")*[^"]*$)/).find((term) => choices.some(([key]) => key === term)) ?? "";
      found.push(choice("task field", [["", "all"], ...choices], now, (value) => {
        const kept = (filter.q ?? "").replace(now, "").trim();
        box.value = [kept, value].filter(Boolean).join(" ");
        change({ q: box.value });
      }));
    }
    if (Object.keys(filter).some((key) => filter[key])) found.push(h("button", { onclick: clear }, "Clear"));
    replace(bar, found);
    if (focused) bar.querySelector(`[aria-label="${focused}"]`)?.focus();
  }

  function clear() {
    for (const key of Object.keys(filter)) delete filter[key];
    box.value = "";
    change({});
  }

  async function search(text) {
    if (!text) {
      hits = null;
      return draw();
    }
    if (app.texts.has(text)) {
      hits = app.texts.get(text);
      return draw();
    }
    hits = new Set();
    draw();
    for (const [run, { state }] of app.runs.entries()) {
      const names = state.files.map((file) => file.name).reverse();
      for (let k = 0; k < names.length; k += 16) {
        const found = await app.source.search(run, text, names.slice(k, k + 16));
        if (parsed(filter.q ?? "", samples).text !== text) return;
        for (const [file, rows] of Object.entries(found)) for (const row of rows) hits.add(samples.at(run, file, row));
        draw(k + 16 < names.length ? "searching…" : "");
      }
    }
    hits.delete(undefined);
    app.texts.clear(); // a run goes on: only the last one is kept
    app.texts.set(text, hits);
    draw();
  }

  function draw(note = "") {
    const former = app.list[at];
    app.list = chosen(samples, filter, hits);
    at = former === undefined ? -1 : app.list.indexOf(former);
    const stay = list.element.scrollTop;
    list.reset(app.list.length);
    list.element.scrollTop = stay;
    const errors = samples.errors.size ? ` · ${[...samples.errors.values()].join(" · ")}` : "";
    replace(count, `${app.list.length.toLocaleString("en-US")} of ${samples.count.toLocaleString("en-US")} samples`, note && ` · ${note}`, app.loading && ` · ${app.loading}`, errors && h("span", { class: "bad" }, errors));
    table.setAttribute("aria-rowcount", app.list.length + 1);
    empty.hidden = app.list.length > 0;
    replace(empty, samples.count === 0 ? (app.ready ? "No conversation is stored yet." : "Reading…") : "No sample is like that.");
    replace(head, SHOWN.map(heading));
  }

  function change(given) {
    Object.assign(filter, given);
    app.remember(filter);
    at = -1;
    list.element.scrollTop = 0;
    controls();
    search(parsed(filter.q ?? "", samples).text);
  }

  function move(by) {
    const before = at;
    at = Math.max(0, Math.min(app.list.length - 1, at + by));
    list.reveal(at);
    list.again(before);
    list.again(at);
    list.shown.get(at)?.querySelector("a").focus({ preventScroll: true });
  }

  function update() {
    if (app.about.follow && !filter.step && !params.step && !filter.split && !filter.sort) list.element.scrollTop = 0;
    controls();
    draw();
  }

  const table = h("div", { class: "samples", role: "table", "aria-label": "samples", style: { "--columns": template() } }, h("div", { role: "rowgroup" }, head), list.element);
  const empty = h("p", { class: "empty", hidden: true });
  const element = h("div", { class: "view full" }, h("h1", { class: "hidden" }, "Conversations"), bar, count, table, empty);
  const keys = {
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => app.list[at] !== undefined && (location.hash = app.linkOf(app.list[at])),
    Escape: clear,
  };
  controls();
  draw();
  const look = () => search(parsed(filter.q ?? "", samples).text);
  function shown() {
    look();
    if (!app.seat || location.hash !== app.back) return; // where one was before a conversation was opened
    at = app.list.indexOf(app.seat.sample);
    list.element.scrollTop = app.seat.top;
    list.draw();
    list.again(at);
    list.shown.get(at)?.querySelector("a").focus({ preventScroll: true });
  }
  function close() {
    app.seat = { sample: app.list[at], top: list.element.scrollTop };
    list.sizes.disconnect();
  }
  return { element, title: "Conversations", update, search: box, keys, shown, ready: look, close };
}

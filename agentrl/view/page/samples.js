// Every sample of every step and split: a table to filter and sort.

import { h, LongList, choice, copyButton, download, number, replace, seconds, later } from "./dom.js";
import { fieldIs, names, query, suggestions, valueOf } from "./query.js";

const AT_ONCE = 64; // files that are searched together
const REDRAW = 400; // milliseconds between drawings of what was found so far: to draw takes longer than to search
const ROW = 30; // pixels
// name -> [heading, width, priority on narrow screens (1: always)]
const KNOWN = {
  mark: ["", "2rem", 1], step: ["step", "3rem", 1], split: ["split", "5.5rem", 2], task: ["task", "8rem", 2],
  prompt: ["prompt", "minmax(9rem, 1fr)", 1], reward: ["reward", "4rem", 1], advantage: ["adv.", "3.6rem", 3],
  finish: ["finish", "5.5rem", 2], turns: ["turns", "3rem", 3], tool_errors: ["errors", "3.6rem", 3],
  label: ["label", "6rem", 2], tokens: ["tokens", "4rem", 3], total_s: ["time", "4.4rem", 3],
};
const SHOWN = ["mark", "step", "split", "task", "prompt", "reward", "advantage", "finish", "turns", "tool_errors", "tokens", "total_s"];
const MOST_COLUMNS = 24;
const OUTCOMES = [["", "all"], ["solved", "solved"], ["unsolved", "unsolved"], ["failed", "failed (machinery)"], ["untrained", "not trained on"], ["branched", "branched"]];
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

// The samples that fit, in order. asked: what the field above the table asks for; hits: text -> the samples that say it.
export function chosen(samples, filter, asked, hits) {
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
  if (asked.error) return [];
  if (asked.test) tests.push((i) => asked.test(i, hits));
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
const plain = (v) => (v === null || v === undefined ? "" : typeof v === "number" ? (Number.isInteger(v) ? String(v) : number(v)) : String(v));

// The columns that the reader chose: of the address, else those of last time.
function shownColumns(given) {
  let kept = given;
  try {
    kept ??= localStorage.getItem("agentrl-columns");
  } catch {} // this browser keeps nothing
  const found = [...new Set((kept || "").split(",").filter(Boolean))].slice(0, MOST_COLUMNS);
  return found.length ? found : SHOWN;
}

// The query with a condition in place of another of its own kind.
function withTerm(text, former, next) {
  const rest = former ? ` ${text} `.replace(` ${former} `, " ").trim() : text.trim();
  const safe = next && /(^|\s)OR(\s|$)/.test(rest) ? `(${rest})` : rest;
  return [safe, next].filter(Boolean).join(" ");
}

export function samplesView(app, params) {
  const filter = { ...params };
  let at = -1;
  let hits = new Map();
  let searches = 0;
  let columns = shownColumns(filter.cols);
  const { samples } = app;
  let asked = query(filter.q ?? "", samples);
  const list = new LongList(ROW, row, { tabindex: 0, role: "rowgroup", "aria-label": "samples" });
  const count = h("span", { class: "soft", role: "status" });
  const head = h("div", { class: "row head", role: "row" });
  const bar = h("div", { class: "unboxed" }); // what is made anew: the field keeps its focus and suggestions
  const box = h("input", { type: "search", value: filter.q ?? "", placeholder: 'text, or reward<1 AND (tool:search OR "left over") NOT label:good', "aria-label": "search conversations", role: "combobox", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": "suggested", autocomplete: "off", spellcheck: "false" });
  const suggested = h("ul", { id: "suggested", class: "suggested", role: "listbox", "aria-label": "suggestions", hidden: true });
  const typed = later(200, () => change({ q: box.value }));
  const field = h("div", { class: "wide combo" }, box, suggested);
  let offered = [], offeredFrom = 0, offeredAt = -1;

  function suggest() {
    const found = suggestions(box.value, box.selectionStart ?? box.value.length, samples);
    offered = document.activeElement === box ? found.options : [];
    offeredFrom = found.from;
    offeredAt = -1;
    replace(suggested, offered.map(([text, what], k) => h("li", { role: "option", id: `suggested-${k}`, "aria-selected": "false", onpointerdown: (event) => {
      event.preventDefault(); // the field keeps the focus
      accept(k);
    } }, h("b", null, text), h("span", { class: "soft" }, what))));
    suggested.hidden = offered.length === 0;
    box.setAttribute("aria-expanded", String(offered.length > 0));
    box.removeAttribute("aria-activedescendant");
  }

  function close() {
    offered = [];
    suggested.hidden = true;
    box.setAttribute("aria-expanded", "false");
    box.removeAttribute("aria-activedescendant");
  }

  function accept(k) {
    const [text] = offered[k];
    const end = box.selectionStart ?? box.value.length;
    const open = /[:<]$/.test(text); // a value comes next
    const rest = box.value.slice(end);
    box.value = `${box.value.slice(0, offeredFrom)}${text}${open || rest.startsWith(" ") ? "" : " "}${rest}`;
    const cursor = offeredFrom + text.length + (open ? 0 : 1);
    box.setSelectionRange(cursor, cursor);
    if (open) suggest();
    else close();
    typed();
  }

  box.addEventListener("input", () => {
    suggest();
    typed();
  });
  box.addEventListener("blur", close);
  box.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by && suggested.hidden) suggest();
    else if (by) {
      suggested.children[offeredAt]?.setAttribute("aria-selected", "false");
      offeredAt = (offeredAt + by + offered.length + (offeredAt < 0 && by < 0 ? 1 : 0)) % offered.length;
      suggested.children[offeredAt].setAttribute("aria-selected", "true");
      suggested.children[offeredAt].scrollIntoView({ block: "nearest" });
      box.setAttribute("aria-activedescendant", `suggested-${offeredAt}`);
    } else if ((event.key === "Enter" || event.key === "Tab") && offeredAt >= 0) accept(offeredAt);
    else if (event.key === "Enter") {
      close();
      return;
    } else return;
    event.preventDefault();
  });

  const shape = (name) => KNOWN[name] ?? [name.replace(/^(part|data)\./, ""), "6rem", 3];
  const template = (most) => columns.map(shape).filter(([, , priority]) => priority <= most).map(([, width]) => width).join(" ");
  const numeric = new Map(); // column -> whether it holds numbers; as long as the samples are the same
  function isNumber(name) {
    if (!numeric.has(name)) numeric.set(name, typeof samples.column[name]?.find((v) => v !== null) === "number");
    return numeric.get(name);
  }

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
    const cells = columns.map((key) => {
      const link = () => h("a", { href: app.linkOf(i), tabindex: -1 }, h("span", { class: "hidden" }, `conversation of ${column.task[i]} `), h("span", { class: "text" }, prompt(i)));
      const value = valueOf(samples, key);
      const inside = key === "mark" ? mark(column, i) : key === "prompt" ? link() : (WRITTEN[key] ?? plain)(value === null ? null : value(i));
      return h("span", { role: "cell", class: `p${shape(key)[2]} ${key === "prompt" ? key : ""}${isNumber(key) ? " number" : ""}` }, inside);
    });
    return h("div", { class: `row${index === at ? " at" : ""}`, role: "row", "aria-rowindex": index + 2 }, cells);
  }

  function heading(key) {
    const [text, , priority] = shape(key);
    if (key === "prompt") return h("span", { role: "columnheader", class: `p${priority}` }, text);
    const order = filter.sort === key ? "ascending" : filter.sort === `-${key}` ? "descending" : "none";
    const arrow = { ascending: " ↑", descending: " ↓", none: "" }[order];
    const turn = () => change({ sort: filter.sort === key ? `-${key}` : filter.sort === `-${key}` ? "" : key });
    return h("span", { role: "columnheader", "aria-sort": order, class: `p${priority}${isNumber(key) ? " number" : ""}`, title: names(samples).get(key) ?? null }, h("button", { class: "plain", onclick: turn, "aria-label": `sort by ${text || "outcome"}` }, text || "✓", arrow));
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
    const found = [];
    if (app.runs.length > 1) found.push(choice("run", [["", "all"], ...app.runs.map((run, i) => [String(i), run.name])], filter.run, set("run")));
    found.push(choice("split", options("split"), filter.split, set("split")));
    const steps = [...new Set(samples.column.step)].filter((v) => v !== null && v !== undefined).sort((a, b) => a - b);
    found.push(choice("step", [["", "all"], ...steps.map((v) => [String(v), String(v)])], filter.step, set("step")));
    found.push(choice("outcome", OUTCOMES, filter.outcome, set("outcome")));
    found.push(choice("finish", options("finish"), filter.finish, set("finish")));
    found.push(choice("tool errors", [["", "all"], ["yes", "some"], ["no", "none"]], filter.errors, set("errors")));
    if (distinct("environment").length > 1) found.push(choice("environment", options("environment"), filter.environment, set("environment")));
    const term = (name, options) => {
      const now = options.find(([key]) => ` ${filter.q ?? ""} `.includes(` ${key} `))?.[0] ?? "";
      found.push(choice(name, [["", "all"], ...options], now, (value) => {
        box.value = withTerm(filter.q ?? "", now, value);
        change({ q: box.value });
      }));
    };
    for (const [name, key] of [["scanner", "scan"], ["label", "label"]]) {
      const there = [...new Set(samples.column[key].flatMap((one) => (one ? one.split(" ") : [])))].sort();
      if (there.length) term(name, there.map((one) => [`${key}:${one}`, one]));
    }
    const fields = [...samples.fields].filter(([name, values]) => values.size > 1 && values.size <= 40 && !name.includes('"'));
    if (fields.length) term("task field", fields.flatMap(([name, values]) => [...values].map(String).sort().map((v) => [fieldIs(samples, name, v), `${name}: ${v}`])));
    if (Object.keys(filter).some((key) => key !== "cols" && filter[key])) found.push(h("button", { onclick: clear }, "Clear"));
    replace(bar, found);
    if (focused) bar.querySelector(`[aria-label="${focused}"]`)?.focus();
  }

  function clear() {
    for (const key of Object.keys(filter)) if (key !== "cols") delete filter[key];
    box.value = "";
    change({});
  }

  // Look for the texts of the query in the conversations, one after the other.
  async function search() {
    const mine = ++searches;
    asked = query(filter.q ?? "", samples);
    hits = new Map();
    for (const text of asked.texts) {
      hits.set(text, app.texts.get(text) ?? new Set());
      if (app.texts.has(text)) continue;
      const found = hits.get(text);
      draw("searching…");
      let drawn = performance.now();
      for (const [run, { state }] of app.runs.entries()) {
        const files = state.files.map((file) => file.name).reverse();
        for (let k = 0; k < files.length; k += AT_ONCE) {
          for (const [file, rows] of Object.entries(await app.source.search(run, text, files.slice(k, k + AT_ONCE)))) for (const row of rows) found.add(samples.at(run, file, row));
          if (mine !== searches) return;
          if (performance.now() - drawn >= REDRAW) {
            draw("searching…");
            drawn = performance.now();
          }
        }
      }
      found.delete(undefined);
    }
    app.texts = hits; // a run goes on: only those of the last query are kept
    draw();
  }

  function draw(note = "") {
    const former = app.list[at];
    numeric.clear();
    app.list = chosen(samples, filter, asked, hits);
    at = former === undefined ? -1 : app.list.indexOf(former);
    const stay = list.element.scrollTop;
    list.reset(app.list.length);
    list.element.scrollTop = stay;
    const errors = samples.errors.size ? ` · ${[...samples.errors.values()].join(" · ")}` : "";
    const wrong = app.ready ? asked.error : "";
    replace(count, wrong ? h("span", { class: "bad" }, wrong) : `${app.list.length.toLocaleString("en-US")} of ${samples.count.toLocaleString("en-US")} samples`, note && ` · ${note}`, app.loading && ` · ${app.loading}`, errors && h("span", { class: "bad" }, errors));
    table.setAttribute("aria-rowcount", app.list.length + 1);
    empty.hidden = app.list.length > 0 || Boolean(wrong);
    if (wrong) box.setAttribute("aria-invalid", "true");
    else box.removeAttribute("aria-invalid");
    if (!empty.hidden) replace(empty, samples.count === 0 ? (app.ready ? "No conversation is stored yet." : "Reading…") : (note ? "Searching…" : asked.hint() || "No sample is like that."));
    replace(head, columns.map(heading));
  }

  function change(given) {
    Object.assign(filter, given);
    app.remember(filter);
    at = -1;
    list.element.scrollTop = 0;
    controls();
    search();
  }

  function choose(given) {
    columns = given.length ? given : SHOWN;
    for (const [most, name] of [[3, "--columns"], [2, "--columns-2"], [1, "--columns-1"]]) table.style.setProperty(name, template(most));
    filter.cols = columns === SHOWN || columns.join() === SHOWN.join() ? "" : columns.join();
    try {
      localStorage.setItem("agentrl-columns", filter.cols);
    } catch {} // this browser keeps nothing
    app.remember(filter);
    draw();
  }

  // What is chosen, as a file.
  async function save(ending) {
    const files = new Map();
    const { column } = samples;
    for (const i of app.list) {
      const key = `${column.run[i]}\n${column.file[i]}`;
      if (!files.has(key)) files.set(key, { run: column.run[i], file: column.file[i], rows: [] });
      files.get(key).rows.push(column.row[i]);
    }
    replace(saved, "writing…");
    try {
      const wanted = columns.filter((name) => !["mark", "prompt", "step", "split"].includes(name));
      download(await app.source.selection({ as: ending, samples: [...files.values()], columns: columns.includes("mark") ? ["solved", ...wanted] : wanted }), `samples.${ending}`);
      replace(saved, "");
    } catch (error) {
      replace(saved, h("span", { class: "bad" }, error.message));
    }
  }

  const saved = h("span", { role: "status" });
  const ticks = h("div", { class: "ticks" });
  const FILES = [["csv", "CSV", "the table as it is filtered, sorted and with these columns"], ["parquet", "Parquet", "likewise"], ["jsonl", "conversations", "for agentrl sft: JSON lines of messages"]];
  const more = h("details", { class: "more", ontoggle: () => more.open && tick() }, h("summary", null, "Columns, files"), ticks,
    h("div", { class: "ways" }, h("button", { onclick: () => [choose(SHOWN), tick()] }, "Usual columns"),
      app.about.frozen ? null : [FILES.map(([ending, text, title]) => h("button", { title, onclick: () => save(ending) }, text)), copyButton("Copy link", () => app.source.link(), "for another browser of yours")], saved));

  function tick() {
    const every = [...new Set([...SHOWN, ...names(samples).keys()])];
    replace(ticks, every.map((name) => h("label", { class: "tick" }, h("input", { type: "checkbox", checked: columns.includes(name), onchange: (event) =>
      choose(event.target.checked ? [...columns, name].slice(0, MOST_COLUMNS) : columns.filter((one) => one !== name)) }), name === "mark" ? "solved (mark)" : name)));
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
    asked = query(filter.q ?? "", samples); // of columns and fields that came meanwhile
    if (app.about.follow && !filter.step && !params.step && !filter.split && !filter.sort) list.element.scrollTop = 0;
    controls();
    draw();
  }

  const table = h("div", { class: "samples", role: "table", "aria-label": "samples", style: { "--columns": template(3), "--columns-2": template(2), "--columns-1": template(1) } }, h("div", { role: "rowgroup" }, head), list.element);
  const empty = h("p", { class: "empty", hidden: true });
  const element = h("div", { class: "view full" }, h("h1", { class: "hidden" }, "Conversations"), h("div", { class: "bar" }, field, bar, more), count, table, empty);
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
  const look = search;
  function shown() {
    look();
    if (!app.seat || location.hash !== app.back) return; // where one was before a conversation was opened
    at = app.list.indexOf(app.seat.sample);
    list.element.scrollTop = app.seat.top;
    list.draw();
    list.again(at);
    list.shown.get(at)?.querySelector("a").focus({ preventScroll: true });
  }
  function leave() {
    app.seat = { sample: app.list[at], top: list.element.scrollTop };
    list.sizes.disconnect();
  }
  return { element, title: "Conversations", update, search: box, keys, shown, ready: look, close: leave };
}

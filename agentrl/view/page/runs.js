// Every run and evaluation of a folder: state, figures, where recipes differ. One or several are chosen here.

import { h, LongList, choice, number, percent, replace, seconds, later } from "./dom.js";

const ROW = 34; // pixels
const MOST = 64; // runs that are shown together
const FIXED = 900, WIDE = 1500; // pixels of the other columns, and from which on there is room for all of them
const LATER = ["code.", "eval.", "track.", "train.threads", "model.device"]; // keys that come last among the differences
const NARROW = { name: "minmax(5rem, 1fr)", state: "4.6rem", last: "4.2rem" }; // widths on a phone
const BAD = new Set(["killed", "failed", "broken"]);

const when = (time) => (time ? new Date(1000 * time).toLocaleString("en-GB", { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit" }) : "");
const isShare = (key) => key.endsWith("/accuracy");
const written = (key, value) => (value === null || value === undefined ? "" : isShare(key) ? percent(value) : number(value));

// The keys whose values differ among runs, or among evaluations where there are no two runs.
export function differences(rows) {
  const values = new Map();
  const known = rows.filter((row) => Object.keys(row.recipe ?? {}).length);
  const runs = known.filter((row) => row.kind === "run");
  const read = runs.length > 1 ? runs : known;
  for (const row of read) for (const [key, value] of Object.entries(row.recipe)) values.set(key, (values.get(key) ?? new Map()).set(row.name, value));
  const late = (key) => LATER.some((one) => key.startsWith(one));
  const found = [...values].filter(([, one]) => one.size < read.length || new Set(one.values()).size > 1).map(([key]) => key);
  return found.sort((a, b) => late(a) - late(b) || values.get(b).size - values.get(a).size);
}

function metrics(rows) {
  const counts = new Map();
  for (const row of rows) for (const key of Object.keys(row.figures ?? {})) counts.set(key, (counts.get(key) ?? 0) + 1);
  const usual = (key) => key === "eval/test/accuracy";
  return [...counts].sort((a, b) => usual(b[0]) - usual(a[0]) || isShare(b[0]) - isShare(a[0]) || b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([key]) => key);
}

function state(row) {
  if (row.state === undefined) return h("span", { class: "soft" }, "reading…");
  return h("span", { class: row.state === "running" ? "live" : BAD.has(row.state) ? "bad" : "soft" }, row.state);
}

function step(row) {
  if (row.kind === "evaluation") return "evaluation";
  if (row.step === null || row.step === undefined) return "";
  return row.steps ? `${row.step} of ${row.steps}` : String(row.step);
}

export function runsView(app, params) {
  const filter = { ...params };
  const chosen = new Set(app.names);
  let all = [], shown = [], at = -1, keys = [], metric = "", notes = [], told = "", reading = 0;
  const list = new LongList(ROW, row, { tabindex: 0, role: "rowgroup", "aria-label": "runs" });
  const head = h("div", { class: "row head", role: "row" });
  const bar = h("div", { class: "bar" });
  const count = h("span", { class: "soft", role: "status" });
  const go = h("span", { class: "links" });
  const empty = h("p", { class: "empty", hidden: true });
  const box = h("input", { type: "search", class: "wide", value: filter.q ?? "", placeholder: "name, state, or a key of the recipe: train.lr=0.001", "aria-label": "filter runs", oninput: later(80, () => change({ q: box.value })) });

  // [key, heading, width, priority on narrow screens, a row's value to sort by, a row's cell]
  function columns() {
    const figure = (row, name) => row.figures?.[metric]?.[name];
    const cell = (name) => (row) => written(metric, figure(row, name));
    const last = (row) => {
      const one = row.figures?.[metric];
      if (!one) return "";
      const bound = (value) => (isShare(metric) ? Math.round(100 * value) : number(value, 2));
      const interval = typeof one.low === "number" && typeof one.high === "number" ? ` ${bound(one.low)} to ${bound(one.high)}` : "";
      return [written(metric, one.last), h("span", { class: "soft p2" }, interval)];
    };
    return [
      ["pick", "", "1.5rem", 1, (row) => -chosen.has(row.name), pick],
      ["name", "run", "minmax(9rem, 1.6fr)", 1, (row) => row.name, name],
      ["state", "state", "5.6rem", 1, (row) => row.state, state],
      ["step", "step", "5.6rem", 2, (row) => row.step, step],
      ["first", "first", "4.2rem", 3, (row) => figure(row, "first"), cell("first")],
      ["best", "best", "4.2rem", 2, (row) => figure(row, "best"), cell("best")],
      ["last", "last", isShare(metric) ? "7.6rem" : "10rem", 1, (row) => figure(row, "last"), last],
      ["reward", "reward", "3.6rem", 3, (row) => row.figures?.["reward/mean"]?.last, (row) => written("", row.figures?.["reward/mean"]?.last)],
      ["seconds", "time", "4rem", 3, (row) => row.seconds, (row) => seconds(row.seconds)],
      ...(innerWidth < WIDE ? [] : [["began", "began", "7rem", 3, (row) => row.began, (row) => when(row.began)]]),
      ...keys.slice(0, room()).map((key) => [key, short(key), "minmax(3.6rem, 1fr)", 3, (row) => comparable(row.recipe?.[key]), (row) => row.recipe?.[key] ?? ""]),
    ];
  }

  // How many keys of recipes have a column.
  const room = () => Math.max(2, Math.floor((innerWidth - FIXED - (innerWidth < WIDE ? 0 : 125)) / 70));
  // A key by its last part, where that is no other's.
  const short = (key) => {
    const tail = (one) => one.split(".").at(-1);
    return keys.some((one) => one !== key && tail(one) === tail(key)) ? key : tail(key);
  };
  const comparable = (value) => (value !== undefined && value !== "" && Number.isFinite(Number(value)) ? Number(value) : value);

  function pick(row) {
    const tick = h("input", { type: "checkbox", checked: chosen.has(row.name), "aria-label": `choose ${row.name}`, onchange: () => {
      if (tick.checked) chosen.add(row.name);
      else chosen.delete(row.name);
      tell();
    } });
    return tick;
  }

  function name(row) {
    const depth = row.name.split("/evals/").length - 1;
    const link = h("a", { href: app.link("overview", { runs: row.name }), title: [row.name, row.error, ...(row.health ?? []).map((one) => `health: ${one.replaceAll("_", " ")}`)].filter(Boolean).join("\n"), style: { "padding-left": depth && filter.sort === undefined ? "1.2rem" : "0" } },
      depth && !filter.sort ? `evals/${row.name.split("/evals/").at(-1)}` : row.name);
    return [link, row.error ? h("span", { class: "bad" }, ` ${row.error}`) : null, row.health?.length ? h("span", { class: "warn" }, ` ${row.health.map((one) => one.replaceAll("_", " ")).join(", ")}`) : null];
  }

  let laid = columns();

  function row(index) {
    const one = shown[index];
    const cells = laid.map(([key, , , priority, , cell]) => {
      const inside = cell(one);
      return h("span", { role: "cell", class: `p${priority}${["first", "best", "last", "reward", "seconds"].includes(key) ? " number" : ""}`, title: typeof inside === "string" && inside.length > 8 ? inside : null }, inside);
    });
    return h("div", { class: `row${index === at ? " at" : ""}`, role: "row", "aria-rowindex": index + 2 }, cells);
  }

  function heading([key, text, , priority]) {
    const of = `p${priority}${["first", "best", "last", "reward", "seconds"].includes(key) ? " number" : ""}`;
    if (key === "pick") {
      const every = shown.length > 0 && shown.every((one) => chosen.has(one.name));
      const tick = h("input", { type: "checkbox", checked: every, "aria-label": "choose all", onchange: () => {
        for (const one of shown) if (tick.checked) chosen.add(one.name);
        else chosen.delete(one.name);
        draw();
      } });
      return h("span", { role: "columnheader", class: of }, tick);
    }
    const order = filter.sort === key ? "ascending" : filter.sort === `-${key}` ? "descending" : "none";
    const turn = () => change({ sort: filter.sort === `-${key}` ? key : filter.sort === key ? "" : `-${key}` });
    return h("span", { role: "columnheader", "aria-sort": order, class: of, title: key }, h("button", { class: "plain", onclick: turn, "aria-label": `sort by ${text}` }, text, { ascending: " ↑", descending: " ↓", none: "" }[order]));
  }

  function ordered(rows) {
    const sort = filter.sort ?? "";
    const column = laid.find(([key]) => key === sort.replace(/^-/, ""));
    if (!column) return rows;
    const [sign, value] = [sort.startsWith("-") ? -1 : 1, column[4]];
    const none = (v) => v === undefined || v === null || v === "";
    return [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (none(x) || none(y)) return none(x) - none(y);
      return sign * (typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : String(x) < String(y) ? -1 : 1);
    });
  }

  function fits(row) {
    const words = (filter.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    if (filter.kind && row.kind !== filter.kind) return false;
    if (words.length === 0) return true;
    const text = [row.name, row.state, row.kind, row.model, row.error, ...(row.health ?? []), ...Object.entries(row.recipe ?? {}).map(([key, value]) => `${key}=${value}`)].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  function draw() {
    const former = shown[at]?.name;
    const rows = all.filter(fits);
    const known = metrics(rows);
    metric = known.includes(filter.figure) ? filter.figure : known[0] ?? "";
    keys = differences(rows);
    laid = columns();
    shown = ordered(rows);
    at = former === undefined ? -1 : shown.findIndex((one) => one.name === former);
    for (const [width, most] of [["", 3], ["-2", 2], ["-1", 1]]) table.style.setProperty(`--columns${width}`, laid.filter(([, , , priority]) => priority <= most).map(([key, , size]) => ((most === 1 && NARROW[key]) || size)).join(" "));
    table.setAttribute("aria-rowcount", shown.length + 1);
    const stay = list.element.scrollTop;
    const focused = list.element.contains(document.activeElement) ? document.activeElement : null;
    list.reset(shown.length);
    list.element.scrollTop = stay;
    if (focused) [...list.element.querySelectorAll("a, input")].find((one) => one.title === focused.title && one.ariaLabel === focused.ariaLabel)?.focus({ preventScroll: true });
    const more = keys.slice(room());
    replace(count, `${shown.length} of ${all.length} runs and evaluations`, reading ? ` · reading ${reading}` : "", more.length ? h("span", { title: more.join("\n") }, ` · recipes differ in ${more.length} more ${more.length === 1 ? "key" : "keys"}`) : "",
      notes.length ? h("span", { class: "bad" }, ` · ${notes.join(" · ")}`) : "");
    empty.hidden = shown.length > 0;
    replace(empty, all.length === 0 ? "No run lies there yet." : "No run is like that.");
    controls(known);
    tell();
  }

  // What is chosen, and where it leads.
  function tell() {
    replace(head, laid.map(heading));
    const those = [...chosen].filter((one) => all.some((row_) => row_.name === one)).slice(0, MOST);
    const runs = those.join("\n");
    replace(go, those.length ? [h("b", null, `${those.length} chosen: `), [["overview", "side by side"], ["curves", "curves over each other"], ["samples", "conversations"]].map(([view, text]) => h("a", { href: app.link(view, { runs }) }, text)),
      h("button", { onclick: () => (chosen.clear(), draw()) }, "Choose none")] : h("span", { class: "soft" }, "Open one, or choose several to see them together."));
  }

  function controls(known) {
    const facing = JSON.stringify([known, filter.kind, metric]);
    if (facing === told) return;
    told = facing;
    const found = [box, choice("kind", [["", "all"], ["run", "runs"], ["evaluation", "evaluations"]], filter.kind, (kind) => change({ kind }))];
    if (known.length) found.push(choice("figure", known.map((key) => [key, key]), metric, (figure) => change({ figure })));
    const focused = bar.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    replace(bar, found);
    if (focused) bar.querySelector(`[aria-label="${focused}"]`)?.focus();
  }

  function change(given) {
    Object.assign(filter, given);
    app.remember(filter);
    at = -1;
    list.element.scrollTop = 0;
    draw();
  }

  let seen = "", busy = false;
  async function look() {
    if (busy) return;
    busy = true;
    try {
      for (let more = true; more && table.isConnected; ) {
        const found = await app.source.runs();
        const text = JSON.stringify(found);
        if (text !== seen) {
          seen = text;
          [all, notes, reading] = [found.runs, found.notes, found.reading];
          draw();
        }
        more = found.reading > 0;
      }
    } finally {
      busy = false;
    }
  }

  function move(by) {
    const before = at;
    at = Math.max(0, Math.min(shown.length - 1, at + by));
    list.reveal(at);
    list.again(before);
    list.again(at);
    list.shown.get(at)?.querySelector("a")?.focus({ preventScroll: true });
  }

  const table = h("div", { class: "samples runs", role: "table", "aria-label": "runs" }, h("div", { role: "rowgroup" }, head), list.element);
  const element = h("div", { class: "view full" }, h("h1", { class: "hidden" }, "Runs"), bar, h("div", { class: "links" }, count, go), table, empty);
  const mark = () => {
    const one = shown[at];
    if (one === undefined) return;
    if (!chosen.delete(one.name)) chosen.add(one.name);
    draw();
  };
  const bound = {
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    x: mark,
    Enter: () => shown[at] && app.go("overview", { runs: shown[at].name }),
    Escape: () => {
      box.value = "";
      change({ q: "", kind: "", sort: "" });
    },
  };
  draw();
  return { element, title: "Runs", keys: bound, search: box, look, shown: look, close: () => list.sizes.disconnect() };
}

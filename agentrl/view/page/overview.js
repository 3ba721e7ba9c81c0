// What a run did, in one screen: before and after, health, recipe, where its results lie.

import { h, number, percent, replace, later } from "./dom.js";
import { chart, interval } from "./chart.js";

const MAIN = ["reward/mean", "groups/varied", "train/entropy", "train/grad_norm", "rollout/turns_mean"];

// Accuracies by split: those of stored evaluations, which have intervals, and those of metrics beside them.
export function accuracies(run) {
  const found = new Map();
  const at = (split, step) => {
    if (!found.has(split)) found.set(split, new Map());
    if (!found.get(split).has(step)) found.get(split).set(step, { step });
    return found.get(split).get(step);
  };
  for (const row of run.rows) {
    for (const [key, value] of Object.entries(row)) {
      const m = /^eval\/(.+)\/accuracy$/.exec(key);
      if (m && typeof value === "number") at(m[1], row.step).accuracy = value;
    }
  }
  for (const one of run.evaluations) Object.assign(at(one.split, one.step), one);
  for (const [split, steps] of found) found.set(split, [...steps.values()].sort((a, b) => a.step - b.step));
  return found;
}

// Each finding of health by name: first and last step in a row, and its newest line.
export function findings(run) {
  const found = new Map();
  for (const row of run.rows) {
    for (const one of Array.isArray(row.health) ? row.health : []) {
      const name = String(one?.name ?? "");
      const known = found.get(name) ?? { name, first: row.step, times: 0 };
      found.set(name, { ...known, last: row.step, line: String(one?.line ?? ""), times: known.times + 1 });
    }
  }
  return [...found.values()].sort((a, b) => b.last - a.last);
}

// What the model could before it was taught: the accuracy before the recipe's start.
function untaught(run, split) {
  const row = run.rows.find((one) => typeof one[`start/${split}/accuracy`] === "number");
  if (!row) return null;
  const [accuracy, low, high] = ["", "_low", "_high"].map((end) => row[`start/${split}/accuracy${end}`]);
  return { accuracy, low, high };
}

function card(app, number_, split, rows, taught) {
  const first = rows[0], last = rows[rows.length - 1];
  const changed = rows.length > 1;
  const marks = (changed ? [{ ...first, kind: "before" }, { ...last, kind: "after" }] : [{ ...last, kind: "after" }])
    .map((one) => ({ value: one.accuracy, low: one.low, high: one.high, kind: one.kind }));
  const span = (one) => (one.low === undefined ? "" : `${percent(one.low)} to ${percent(one.high)}`);
  const reward = (one) => one.reward === undefined || Math.abs(one.reward - one.accuracy) < 1e-9 ? "" : `reward ${number(one.reward)} (${number(one.reward_low)} to ${number(one.reward_high)})`;
  const told = changed ? `${percent(first.accuracy)} before, ${percent(last.accuracy)} after` : percent(last.accuracy);
  const link = last.file && h("a", { href: app.link("samples", { run: number_, split, step: last.step, outcome: "unsolved" }) }, "unsolved samples");
  return h("div", { class: "card" },
    h("div", { class: "soft" }, split, ", held out"),
    h("div", { class: "figure" }, changed && [h("span", { class: "soft" }, percent(first.accuracy)), " → "], percent(last.accuracy)),
    interval(marks, `${split}: ${told}`),
    taught && h("div", { class: "soft" }, `${percent(taught.accuracy)} before the start taught it${taught.low === undefined ? "" : ` (${span(taught)})`}`),
    h("table", { class: "small" }, [changed ? ["before", first] : null, [changed ? "after" : "now", last]].filter(Boolean).map(([when, one]) =>
      h("tr", null, h("th", { scope: "row" }, when), h("td", null, `step ${one.step}`), h("td", null, span(one)), h("td", null, reward(one)), h("td", null, one.tasks && `${one.tasks} tasks`)))),
    link && h("div", null, link));
}

function status(run) {
  const last = run.rows.length ? run.rows[run.rows.length - 1].step : null;
  const planned = run.state.recipes.at(-1)?.tree?.train?.steps;
  const steps = last === null ? "no step yet" : `step ${last}${planned ? ` of ${planned}` : ""}`;
  return h("p", { class: "soft" }, run.state.training ? h("b", { class: "live" }, "trains now") : "at rest", ` · ${steps}`,
    run.error ? h("span", { class: "bad" }, ` · ${run.error}`) : null,
    run.damaged ? h("span", { class: "bad" }, ` · ${run.damaged} lines of metrics.jsonl are damaged and left out`) : null);
}

function health(run) {
  const found = findings(run);
  if (found.length === 0) return null;
  return h("section", null, h("h3", null, "Health"), h("ul", { class: "health" }, found.map((one) =>
    h("li", null, h("b", null, one.name.replaceAll("_", " ")), " ",
      h("span", { class: "soft" }, one.first === one.last ? `step ${one.last}` : `steps ${one.first} to ${one.last}, ${one.times} times`), h("div", null, one.line)))));
}

export function flat(tree, prefix = "") {
  if (tree === null || typeof tree !== "object") return [[prefix, tree === null ? "null" : String(tree)]];
  const entries = Object.entries(tree);
  if (entries.length === 0) return [[prefix, Array.isArray(tree) ? "[]" : "{}"]];
  return entries.flatMap(([key, value]) => flat(value, prefix ? `${prefix}.${key}` : key));
}

function changes(before, after) {
  const [a, b] = [new Map(flat(before)), new Map(flat(after))];
  return [...new Set([...a.keys(), ...b.keys()])].filter((key) => a.get(key) !== b.get(key)).map((key) => [key, a.get(key) ?? "", b.get(key) ?? ""]);
}

function table(head, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": head.join(", ") }, h("table", null, h("thead", null, h("tr", null, head.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map((cell) => h("td", null, cell)))))));
}

function recipes(run) {
  const known = run.state.recipes.filter((recipe) => recipe.tree);
  const broken = run.state.recipes.filter((recipe) => recipe.error);
  if (known.length + broken.length === 0) return null;
  const found = [h("h3", null, "Recipe")];
  for (const recipe of broken) found.push(h("p", { class: "bad" }, `${recipe.name}: ${recipe.error}`));
  known.slice(1).forEach((recipe, i) => {
    const changed = changes(known[i].tree, recipe.tree);
    found.push(h("p", null, h("b", null, recipe.name), " ", h("span", { class: "soft" }, recipe.comment)));
    found.push(table(["key", "before", "from then on"], changed));
  });
  if (known.length) {
    const all = flat(known[known.length - 1].tree);
    const body = h("div");
    const show = (text) => replace(body, table(["key", "value"], all.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(text.toLowerCase()))));
    const box = h("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys of the recipe", oninput: later(80, () => show(box.value)) });
    show("");
    found.push(h("details", null, h("summary", null, `Every key of ${known[known.length - 1].name}`), box, body));
  }
  return h("section", null, found);
}

function places(run) {
  const saved = run.state.checkpoints.map((one) => `step ${one.step}${one.best ? " (best)" : ""}`);
  const rows = [["folder", h("code", null, run.state.folder)]];
  if (saved.length) rows.push(["checkpoints", saved.join(", ")]);
  rows.push(["stored conversations", `${run.state.stored} files in trajectories/`]);
  if (run.state.others.length) rows.push(["beside them", run.state.others.join(", ")]);
  return h("section", null, h("h3", null, "Where results lie"), table(["what", "where"], rows));
}

function main(run) {
  const held = [...accuracies(run)].map(([name, rows], shade) => ({ name, shade, points: rows.map((row) => [row.step, row.accuracy]) }));
  const found = [held.length ? chart({ title: "Held-out accuracy", lines: held, fixed: [0, 1] }) : null];
  for (const key of MAIN) found.push(chart({ title: key, lines: [{ name: run.name, shade: 0, points: run.series(key) }] }));
  return found.filter(Boolean);
}

export function overviewView(app) {
  const element = h("div", { class: "view" });
  function update() {
    if (element.contains(document.activeElement) && document.activeElement.matches("input")) return; // somebody writes there
    const opened = new Set([...element.querySelectorAll("details[open]")].map((one, i) => i));
    replace(element, h("h1", { class: "hidden" }, "Overview"), app.about.note ? h("p", { class: "soft" }, app.about.note) : null, app.runs.map((run, i) => h("section", { class: "run" },
      h("h2", null, run.name), status(run), health(run),
      h("div", { class: "cards" }, [...accuracies(run)].map(([split, rows]) => card(app, i, split, rows, untaught(run, split)))),
      h("div", { class: "charts" }, main(run)), recipes(run), places(run))));
    [...element.querySelectorAll("details")].forEach((one, i) => opened.has(i) && (one.open = true));
  }
  update();
  return { element, title: "Overview", update };
}

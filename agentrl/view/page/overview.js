// What a run did, in one screen: before and after, health, recipe, where its results lie.

import { h, number, percent, replace, later } from "./dom.js";
import { chart, interval } from "./chart.js";
import { heading } from "./curves.js";

const MAIN = ["reward/mean", "groups/varied", "train/entropy", "train/grad_norm", "rollout/turns_mean"];

// Accuracies and rewards by split: those of stored evaluations, and those of metrics beside them.
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
      if (!m || typeof value !== "number") continue;
      const one = at(m[1], row.step);
      const reward = `eval/${m[1]}/reward`;
      const given = { accuracy: value, low: row[`${key}_low`], high: row[`${key}_high`], reward: row[`${reward}/mean`], reward_low: row[`${reward}_low`], reward_high: row[`${reward}_high`] };
      for (const [name, known] of Object.entries(given)) if (typeof known === "number") one[name] = known;
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

// What the model could before it was taught: accuracy and reward before the recipe's start.
function untaught(run, split) {
  const row = run.rows.find((one) => typeof one[`start/${split}/accuracy`] === "number");
  if (!row) return null;
  const [[accuracy, low, high], [reward, reward_low, reward_high]] = ["accuracy", "reward"].map((name) => ["", "_low", "_high"].map((end) => row[`start/${split}/${name}${end}`]));
  return { accuracy, low, high, reward, reward_low, reward_high };
}

// What is known of a split, each with its name: before training, after the recipe's start, and the newest.
function moments(run, split, rows) {
  const first = rows[0], last = rows[rows.length - 1];
  const taught = untaught(run, split);
  const trains = run.rows.length > 0;
  const found = [];
  if (taught) found.push({ ...taught, when: "before", step: null });
  if (trains && first.step === 0) found.push({ ...first, when: taught ? "after the start" : "before" });
  const over = !run.state.training && last.step === run.rows.at(-1)?.step;
  if (last !== first || found.length === 0) found.push({ ...last, when: !trains ? "evaluated" : over ? "after" : `at step ${last.step}` });
  return found;
}

// Whether an evaluation has rewards that its accuracy does not tell.
const isRewarded = (one) => typeof one.reward === "number" && Math.abs(one.reward - one.accuracy) >= 1e-9;
const spanOf = (low, high, written) => (typeof low === "number" && typeof high === "number" ? `${written(low)} to ${written(high)}` : "");

function card(app, number_, split, rows) {
  const told = moments(app.runs[number_], split, rows);
  const last = told[told.length - 1];
  const marks = told.map((one, i) => ({ value: one.accuracy, low: one.low, high: one.high, kind: i === told.length - 1 ? "after" : "before" }));
  const reward = (one) => isRewarded(one) && h("tr", null, h("td"), h("td", { colspan: 3 }, `reward ${number(one.reward)} (${spanOf(one.reward_low, one.reward_high, number)})`.replace(" ()", "")));
  const link = last.file && h("a", { href: app.link("samples", { run: number_, split, step: last.step, outcome: "unsolved" }) }, "unsolved samples");
  return h("div", { class: "card" },
    h("div", { class: "soft" }, split, ", held out"),
    h("div", { class: "figure" }, told.map((one, i) => (i < told.length - 1 ? [h("span", { class: "soft" }, percent(one.accuracy)), " → "] : percent(one.accuracy)))),
    interval(marks, `${split}: ${told.map((one) => `${percent(one.accuracy)} ${one.when}`).join(", ")}`),
    h("table", { class: "small" }, told.map((one) => [
      h("tr", null, h("th", { scope: "row" }, one.when), h("td", null, one.step === null || one.when.startsWith("at step") ? "" : `step ${one.step}`), h("td", null, spanOf(one.low, one.high, percent)), h("td", null, one.tasks && `${one.tasks} tasks`)), reward(one)])),
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

function table(head, rows, of) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${head.join(", ")}: ${of}` }, h("table", null, h("thead", null, h("tr", null, head.map((text) => h("th", { scope: "col" }, text)))),
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
    found.push(table(["key", "before", "from then on"], changed, `${run.name} ${recipe.name}`));
  });
  if (known.length) {
    const all = flat(known[known.length - 1].tree);
    const body = h("div");
    const show = (text) => replace(body, table(["key", "value"], all.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(text.toLowerCase())), run.name));
    const box = h("input", { type: "search", placeholder: "filter keys", "aria-label": `filter keys of the recipe of ${run.name}`, oninput: later(80, () => show(box.value)) });
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
  return h("section", null, h("h3", null, "Where results lie"), table(["what", "where"], rows, run.name));
}

function main(app, run) {
  const held = [...accuracies(run)].map(([name, rows], shade) => ({ name, shade, points: rows.map((row) => [row.step, row.accuracy]), band: rows.filter((row) => typeof row.low === "number").map((row) => [row.step, row.low, row.high]) }));
  const found = [held.length ? chart({ title: "Held-out accuracy", lines: held, fixed: [0, 1] }) : null];
  for (const key of MAIN) found.push(chart({ title: key, told: heading(app, key), lines: [{ name: run.name, shade: 0, points: run.series(key) }] }));
  return found.filter(Boolean);
}

// Several runs beside each other: their figures, and the keys in which their recipes differ.
function compared(app) {
  const { runs } = app;
  const splits = [...new Set(runs.flatMap((run) => [...accuracies(run).keys()]))];
  const figure = (split, [name, low, high], written) => [`${split}, ${name}`, ...runs.map((run) => {
    const told = accuracies(run).get(split);
    const all = told ? moments(run, split, told).filter((one) => typeof one[name] === "number") : [], last = all.at(-1);
    return last ? [all.length > 1 ? `${written(all[0][name])} → ` : "", h("b", null, written(last[name])), h("span", { class: "soft" }, ` ${spanOf(last[low], last[high], written)}`)] : "";
  })];
  const rows = splits.flatMap((split) => [
    figure(split, ["accuracy", "low", "high"], percent),
    ...(runs.some((run) => accuracies(run).get(split)?.some(isRewarded)) ? [figure(split, ["reward", "reward_low", "reward_high"], number)] : []),
  ]);
  rows.push(["reward/mean", ...runs.map((run) => number(run.series("reward/mean").at(-1)?.[1]))]);
  rows.push(["step", ...runs.map((run) => String(run.rows.at(-1)?.step ?? ""))]);
  const trees = runs.map((run) => new Map(flat(run.state.recipes.filter((recipe) => recipe.tree).at(-1)?.tree ?? {})));
  const keys = [...new Set(trees.flatMap((tree) => [...tree.keys()]))].filter((key) => key && key !== "output" && new Set(trees.map((tree) => tree.get(key))).size > 1);
  for (const key of keys) rows.push([h("code", null, key), ...trees.map((tree) => tree.get(key) ?? "")]);
  return h("section", null, h("h2", { tabindex: -1 }, "Side by side"), h("div", { class: "beside" }, table(["figure or key", ...runs.map((run) => run.name)], rows, "side by side")));
}

export function overviewView(app) {
  const element = h("div", { class: "view" });
  const parts = [["health", "Health"], ["results", "Results"], ["curves", "Curves"], ["recipe", "Recipe"], ["places", "Where results lie"]];

  function contents() {
    const go = (place) => {
      const section = element.querySelector(`[data-section="${place}"]`);
      section.scrollIntoView();
      section.querySelector("h2, h3")?.focus({ preventScroll: true });
    };
    const there = app.runs.length > 1 ? [["beside", "Side by side"], ...app.runs.map((run, i) => [`run-${i}`, run.name])] : parts;
    return h("nav", { class: "contents", "aria-label": "sections" }, there.filter(([place]) => element.querySelector(`[data-section="${place}"]`)).map(([place, text]) => h("button", { class: "plain", onclick: () => go(place) }, text)));
  }

  const part = (place, section) => {
    section?.setAttribute("data-section", place);
    section?.querySelector("h3")?.setAttribute("tabindex", "-1");
    return section;
  };

  function update() {
    if (element.contains(document.activeElement) && document.activeElement.matches("input")) return; // somebody writes there
    if (element.querySelector(".meaning:not([hidden])")) return; // somebody reads there
    const opened = new Set([...element.querySelectorAll("details[open]")].map((one, i) => i));
    const curves = (run) => h("section", null, h("h3", null, "Curves"), h("div", { class: "charts" }, main(app, run)));
    const results = (run, i) => {
      const cards = [...accuracies(run)].map(([split, rows]) => card(app, i, split, rows));
      return cards.length ? h("section", null, h("h3", null, "Results"), h("div", { class: "cards" }, cards)) : null;
    };
    replace(element, h("h1", { class: "hidden" }, "Overview"), app.about.note ? h("p", { class: "soft" }, app.about.note) : null, app.runs.length > 1 ? part("beside", compared(app)) : null,
      app.runs.map((run, i) => h("section", { class: "run", "data-section": `run-${i}` }, h("h2", { tabindex: -1 }, run.name), status(run), part("health", health(run)), part("results", results(run, i)), part("curves", curves(run)), part("recipe", recipes(run)), part("places", places(run)))));
    element.querySelector("h1").after(contents());
    [...element.querySelectorAll("details")].forEach((one, i) => opened.has(i) && (one.open = true));
  }
  update();
  return { element, title: "Overview", update };
}

// Every metric of every run, and what each means.

import { h, choice, replace, later } from "./dom.js";
import { chart } from "./chart.js";

const AXES = [["step", "step"], ["tokens", "tokens"], ["time", "time"], ["cost", "cost"]];

// What a table says of a metric; its names may hold parts such as <tool>.
export function named(table, key) {
  if (Object.hasOwn(table, key)) return table[key];
  let found = null, least = Infinity;
  for (const [name, value] of Object.entries(table)) {
    const parts = name.split(/<[^>]*>/);
    if (parts.length === 1 || parts.length >= least) continue;
    const pattern = parts.map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("[^/]+");
    if (new RegExp(`^${pattern}$`).test(key)) [found, least] = [value, parts.length];
  }
  return found;
}

const bounds = ([low, high]) => (low === null ? (high === 0 ? "0" : `at most ${high}`) : high === null ? `at least ${low}` : `${low} to ${high}`);

// The name of a metric, which says what it means once it is pointed at, focused or pressed.
export function heading(app, key) {
  const box = h("div", { class: "meaning", role: "tooltip", hidden: true });
  const button = h("button", { class: "plain term", "aria-expanded": "false" }, key);
  const show = (open) => {
    if (open) replace(box, meaning(app, key));
    box.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
  };
  let held = false;
  button.addEventListener("click", () => show((held = !held)));
  button.addEventListener("keydown", (event) => event.key === "Escape" && show((held = false)));
  const whole = h("span", { class: "heading" }, button, box);
  whole.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(true));
  whole.addEventListener("pointerleave", () => show(held));
  button.addEventListener("focus", () => button.matches(":focus-visible") && show(true));
  button.addEventListener("blur", () => show((held = false)));
  return whole;
}

const brief = (text) => (text.length > 110 ? `${text.slice(0, 100).replace(/\W*\w*$/, "")}…` : text);

function meaning(app, key) {
  const { metrics, watched, conditions } = app.meanings;
  const own = key.startsWith("eval/") || key.startsWith("env/") || key.startsWith("reward/");
  const one = named(metrics, key) ?? {};
  const range = named(app.meanings.ranges, key), within = range && bounds(range);
  const found = [["means", one.meaning ?? (own ? "" : "a metric of your own: nothing is written of it")], ["healthy", within && one.healthy?.startsWith(within) ? one.healthy : [within, one.healthy].filter(Boolean).join("; ")], ["else", one.remedy], ["computed in", one.where && h("code", null, one.where)],
    ["interval", app.runs.some((run) => run.band(key).length) && "the band of a run: 95 %, over tasks"]];
  const health = (watched[key] ?? []).map((name) => h("li", null, h("b", null, name.replaceAll("_", " ")), `: ${brief(conditions[name] ?? "")}`));
  return [h("dl", null, found.filter(([, text]) => text).map(([name, text]) => h("div", null, h("dt", null, name), h("dd", null, text)))),
    health.length ? [h("div", { class: "soft" }, "health looks at it:"), h("ul", null, health)] : null];
}

const IS_BOUND = /_(?:low|high)$/;

function keysOf(runs) {
  const keys = new Set();
  for (const run of runs) for (const key of run.all().keys()) keys.add(key);
  const groups = new Map();
  for (const key of [...keys].sort()) {
    const base = key.replace(IS_BOUND, "");
    if (base !== key && (keys.has(base) || keys.has(`${base}/mean`))) continue; // it is drawn as a band
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

// The values of a recipe by their dotted keys, but for its seed and where it writes.
function leaves(tree, prefix = "", found = new Map()) {
  for (const [key, value] of Object.entries(tree ?? {})) {
    const name = prefix + key;
    if (value !== null && typeof value === "object" && Object.keys(value).length) leaves(value, `${name}.`, found);
    else if (!["train.seed", "output"].includes(name)) found.set(name, JSON.stringify(value));
  }
  return found;
}

// Runs whose recipes differ in nothing but the seed, together: [{name, runs}], in the order of the runs.
export function seedsOf(runs) {
  const found = new Map();
  for (const run of runs) {
    const recipe = leaves(run.state.recipes?.at(-1)?.tree);
    const key = recipe.size ? JSON.stringify([...recipe].sort()) : run.name;
    found.set(key, { recipe, runs: [...(found.get(key)?.runs ?? []), run] });
  }
  const all = [...found.values()];
  const differ = (key) => new Set(all.map(({ recipe }) => recipe.get(key))).size > 1;
  const keys = [...new Set(all.flatMap(({ recipe }) => [...recipe.keys()]))].filter(differ);
  return all.map(({ recipe, runs: those }) => {
    const what = keys.slice(0, 2).filter((key) => recipe.has(key)).map((key) => `${key}=${recipe.get(key).replace(/^"|"$/g, "")}`).join(" ");
    return { runs: those, name: those.length < 2 ? those[0].name : `${what || those[0].name}, mean of ${those.length} seeds` };
  });
}

// The mean of lines where all of them have a point, and a band from the lowest to the highest.
function mean(lines) {
  const [first, ...others] = lines.map((line) => line.steps);
  const points = [], band = [];
  for (const [step, [x, y]] of first) {
    const at = [[x, y], ...others.map((one) => one.get(step)).filter(Boolean)];
    if (at.length < lines.length) continue;
    const place = at.reduce((sum, [one]) => sum + one, 0) / at.length;
    const values = at.map(([, value]) => value);
    points.push([place, values.reduce((sum, value) => sum + value, 0) / values.length]);
    band.push([place, Math.min(...values), Math.max(...values)]);
  }
  return { points, band };
}

export function curvesView(app, params) {
  const state = { text: params.q ?? "", smooth: Number(params.smooth ?? 0), log: params.log === "1", constant: params.constant === "1", axis: params.axis ?? "step", seeds: params.seeds ?? "each", price: Number(params.price ?? 1) };
  const body = h("div");
  const contents = h("nav", { class: "contents", "aria-label": "sections" });
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "400px" });
  const slots = new Map(); // element -> key
  let drawn = "", unit = ["step", 1];

  // What x is called, and how many of what is summed one of it is.
  function unitOf() {
    if (state.axis === "step") return ["step", 1];
    if (state.axis === "cost") return ["cost", 3600 / (state.price || 1)];
    const most = Math.max(1, ...app.runs.map((run) => Math.max(0, ...run.spent(state.axis).values())));
    if (state.axis === "tokens") return most > 2e6 ? ["million tokens", 1e6] : ["tokens", 1];
    return most > 7200 ? ["hours", 3600] : most > 300 ? ["minutes", 60] : ["seconds", 1];
  }

  // What is drawn as a line each.
  const groups = () => (state.seeds === "mean" ? seedsOf(app.runs) : app.runs.map((run) => ({ name: run.name, runs: [run] })));

  function lineOf({ name, runs }, shade, key) {
    const lines = runs.map((run) => {
      const spent = state.axis === "step" ? null : run.spent(state.axis);
      const place = (step) => (spent === null ? step : (spent.get(step) ?? 0) / unit[1]);
      const steps = new Map(run.series(key).map(([step, value]) => [step, [place(step), value]]));
      return { steps, points: [...steps.values()], band: run.band(key).map(([step, low, high]) => [place(step), low, high]) };
    });
    const { points, band } = lines.length > 1 ? mean(lines) : lines[0];
    return { name: app.runs.length > 1 ? name : "", shade, points, band };
  }

  function draw(slot) {
    if (slot.querySelector(".meaning:not([hidden])")) return; // somebody reads it
    const key = slots.get(slot);
    const lines = groups().map((group, shade) => lineOf(group, shade, key)).filter((line) => line.points.length);
    const range = named(app.meanings.ranges, key);
    const note = outside(range, lines) ? h("span", { class: "bad" }, " outside of its healthy range") : null;
    const figure = chart({ title: key, told: heading(app, key), lines, range, log: state.log, smooth: state.smooth, note, axis: unit[0] });
    replace(slot, figure ?? h("figure", { class: "chart" }, h("figcaption", null, heading(app, key)), h("p", { class: "soft" }, "no positive value")));
    seen.unobserve(slot);
  }

  function update() {
    const wanted = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (key) => wanted.every((word) => key.toLowerCase().includes(word));
    seen.disconnect();
    slots.clear();
    tell();
    unit = unitOf();
    let constant = 0;
    const varies = (key) => {
      const varied = app.runs.some((run) => {
        const points = run.series(key);
        return points.length === 1 || points.some((point) => point[1] !== points[0][1]);
      });
      constant += varied ? 0 : 1;
      return varied || state.constant || wanted.length > 0;
    };
    const sets = keysOf(app.runs).map(([name, keys]) => [name, keys.filter((key) => fits(key) && varies(key))]).filter(([, keys]) => keys.length);
    const layout = JSON.stringify([sets, constant]);
    if (layout === drawn && sets.length) { // only the values are new
      for (const slot of body.querySelectorAll(".slot")) seen.observe(slots.set(slot, slot.dataset.key) && slot);
      return;
    }
    drawn = layout;
    const sections = sets.map(([name, keys]) => h("section", { "data-section": name }, h("h2", { tabindex: -1 }, name), h("div", { class: "charts" }, keys.map((key) => {
      const slot = h("div", { class: "slot", "data-key": key });
      slots.set(slot, key);
      return slot;
    }))));
    replace(contents, sets.map(([name, keys], i) => h("button", { class: "plain", onclick: () => {
      sections[i].scrollIntoView();
      sections[i].querySelector("h2").focus({ preventScroll: true });
    } }, name, h("span", { class: "soft" }, ` ${keys.length}`))));
    replace(body, sets.length ? sections : h("p", { class: "empty" }, app.runs.every((run) => run.rows.length === 0) ? "No step is whole yet." : "No metric is named so."));
    if (constant && !wanted.length) body.append(h("p", { class: "soft" }, state.constant ? "" : `${constant === 1 ? "1 metric never changes and is" : `${constant} metrics never change and are`} not drawn. `,
      h("button", { onclick: () => change({ constant: !state.constant }) }, state.constant ? "Leave out what never changes" : constant === 1 ? "Draw it too" : "Draw them too")));
    for (const slot of slots.keys()) seen.observe(slot);
  }

  function change(given) {
    Object.assign(state, given);
    app.remember({ q: state.text, smooth: state.smooth || "", log: state.log ? 1 : "", constant: state.constant ? 1 : "", axis: state.axis === "step" ? "" : state.axis, seeds: state.seeds === "each" ? "" : state.seeds, price: state.axis === "cost" ? state.price : "" });
    price.hidden = state.axis !== "cost";
    update();
  }

  const box = h("input", { type: "search", value: state.text, placeholder: "filter metrics", "aria-label": "filter metrics", oninput: later(80, () => change({ text: box.value })) });
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "smoothing", oninput: later(30, () => change({ smooth: Number(slider.value) })) });
  const log = h("input", { type: "checkbox", checked: state.log, onchange: () => change({ log: log.checked }) });
  const money = h("input", { type: "number", min: 0, step: "any", value: state.price, "aria-label": "price of an hour", oninput: later(80, () => change({ price: Number(money.value) || 1 })) });
  const price = h("label", { class: "field", hidden: state.axis !== "cost", title: "of all machines of a run; the cost is that of the time of its steps" }, h("span", null, "price of an hour"), money);
  const seeds = choice("seeds", [["each", "a line each"], ["mean", "their mean"]], state.seeds, (one) => change({ seeds: one }));
  const legend = h("div", { class: "legend" });

  // The lines that all charts have, and whether there are several seeds of a recipe.
  function tell() {
    const several = seedsOf(app.runs).some(({ runs }) => runs.length > 1);
    seeds.hidden = !several;
    const band = several && state.seeds === "mean" && h("span", { class: "soft" }, "bands: from the lowest to the highest seed");
    replace(legend, app.runs.length > 1 && groups().map(({ name }, i) => h("span", null, h("i", { style: { background: `var(--line-${i % 8})` } }), name)), band);
  }
  const element = h("div", { class: "view" }, h("h1", { class: "hidden" }, "Curves"),
    h("div", { class: "bar" }, box, choice("by", AXES, state.axis, (axis) => change({ axis })), price, seeds, h("label", { class: "field" }, h("span", null, "smoothing"), slider), h("label", { class: "tick" }, log, "log scale")), legend, contents, body);
  update();
  return { element, title: "Curves", update, search: box, close: () => seen.disconnect() };
}

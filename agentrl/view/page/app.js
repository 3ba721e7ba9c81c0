// The page: which view is shown, what it is shown of, keys, colours.

import { h, replace } from "./dom.js";
import { openSource, Samples } from "./data.js";
import { runsView } from "./runs.js";
import { overviewView } from "./overview.js";
import { curvesView } from "./curves.js";
import { samplesView } from "./samples.js";
import { sampleView } from "./sample.js";
import { sideView } from "./side.js";
import { timeView } from "./time.js";
import { errorsView } from "./errors.js";
import { logView } from "./log.js";

const VIEWS = { runs: runsView, overview: overviewView, curves: curvesView, samples: samplesView, errors: errorsView, time: timeView, log: logView, sample: sampleView, side: sideView };
const TABS = [["runs", "Runs"], ["overview", "Overview"], ["curves", "Curves"], ["samples", "Conversations"], ["errors", "Errors"], ["time", "Time"], ["log", "Log"]];
const OF_SAMPLES = new Set(["samples", "errors", "time", "sample", "side"]); // views that read samples
const EVERY = 2000; // milliseconds between two looks at what is new
const FIRST = 2, AT_ONCE = 48; // files whose index is asked for together, at first and later
const KEYS = [
  ["1 to 7", "runs, overview, curves, conversations, errors, time, log"],
  ["/", "filter or search"],
  ["j, k", "next, previous: row, conversation"],
  ["Enter", "open the row"],
  ["Esc", "leave a field; back to the table"],
  ["g", "the group of a conversation, side by side"],
  ["t", "the same task over the steps of training"],
  ["v", "a conversation as chat, tokens, text, tree, data"],
  ["+, -", "label a conversation good, bad"],
  ["d", "dark or light"],
  ["?", "this help"],
];

class Run {
  constructor(name, state) {
    this.name = name;
    this.state = state;
    this.rows = [];
    this.next = 0;
    this.of = "";
    this.damaged = 0;
    this.error = ""; // why its metrics cannot be read
    this.evaluations = [];
    this.lines = new Map();
  }

  all() {
    if (this.lines.size === 0) {
      for (const row of this.rows) {
        for (const [key, value] of Object.entries(row)) {
          if (typeof value !== "number" || key === "step") continue;
          if (!this.lines.has(key)) this.lines.set(key, []);
          this.lines.get(key).push([row.step, value]);
        }
      }
    }
    return this.lines;
  }

  series(key) {
    return this.all().get(key) ?? [];
  }

  // The interval of a metric, [step, low, high] where it was measured with one.
  band(key) {
    const base = key.endsWith("/mean") ? key.slice(0, -5) : key;
    const high = new Map(this.series(`${base}_high`));
    return this.series(`${base}_low`).filter(([step]) => high.has(step)).map(([step, low]) => [step, low, high.get(step)]);
  }

  // Step -> what was sampled by then, or the seconds that its steps took.
  spent(axis) {
    const keys = axis === "tokens" ? ["rollout/tokens", "train/tokens"] : ["time/step_s"];
    const found = new Map();
    let sum = 0;
    for (const row of this.rows) {
      const key = keys.find((one) => typeof row[one] === "number");
      sum += key === undefined ? 0 : row[key];
      found.set(row.step, sum);
    }
    return found;
  }

  // Take new rows; return whether there were any.
  take({ of, start, next, rows, damaged }) {
    const again = start === 0;
    if (!again && rows.length === 0 && damaged === 0) return false;
    const changed = rows.length > 0 || damaged > 0 || this.rows.length > 0;
    this.rows = again ? rows : [...this.rows, ...rows];
    this.damaged = again ? damaged : this.damaged + damaged;
    this.of = of;
    this.next = next;
    this.lines = new Map();
    return changed;
  }
}

class App {
  constructor(source) {
    this.source = source;
    this.names = []; // of the runs that are shown
    this.meanings = { ranges: {}, metrics: {}, watched: {}, conditions: {} };
    this.runs = [];
    this.samples = new Samples();
    this.view = null;
    this.list = []; // the samples that j and k walk through
    this.texts = new Map(); // what was searched for -> the samples found
  }

  // The address of a view, of the runs that are shown where they are not those that were named at the start.
  link(view, params = {}) {
    const { runs } = this.about;
    const own = this.names.length !== runs.length || this.names.some((name, i) => name !== runs[i]);
    const kept = Object.entries({ ...params, runs: params.runs ?? (own ? this.names.join("\n") : "") }).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    const query = new URLSearchParams(kept).toString();
    return `#${view}${query ? `?${query}` : ""}`;
  }

  go(view, params) {
    location.hash = this.link(view, params);
  }

  // Keep a view's settings in the address, without going anywhere.
  remember(params) {
    this.quiet = this.link(this.name, params);
    history.replaceState(null, "", this.quiet);
  }

  linkOf(i, more = {}) {
    const { run, file, row } = this.samples.column;
    return this.link("sample", { run: run[i], file: file[i], row: row[i], ...more });
  }

  // What the address says: a view, its settings, and the runs that it is of.
  place() {
    const [name, query] = location.hash.slice(1).split("?");
    const { runs, ...params } = Object.fromEntries(new URLSearchParams(query ?? ""));
    const first = this.names.length || this.about.frozen ? "overview" : "runs";
    return { name: VIEWS[name] ? name : first, params, runs: runs === undefined ? null : runs.split("\n") };
  }

  async open() {
    const { runs } = this.place();
    if (runs !== null && runs.join("\n") !== this.names.join("\n")) {
      await this.select(runs);
      if (this.place().runs?.join("\n") !== runs.join("\n")) return; // another one was opened meanwhile
    }
    const { name, params } = this.place();
    this.name = this.names.length || name === "runs" ? name : "runs";
    if (OF_SAMPLES.has(this.name) && this.runs.some((run) => !run.whole)) this.ready = false;
    this.view?.close?.();
    const place = window.scrollY;
    this.view = VIEWS[this.name](this, params);
    replace(this.main, this.view.element);
    this.view.shown?.();
    document.title = `${this.view.title} · ${this.runs.length > 3 ? `${this.runs.length} runs` : this.runs.map((run) => run.name).join(", ") || "agentrl"}`;
    for (const tab of this.tabs.children) {
      const mine = tab.dataset.view === this.name || (tab.dataset.view === "samples" && ["sample", "side"].includes(this.name));
      tab.href = this.link(tab.dataset.view);
      tab.hidden = ["runs", "log"].includes(tab.dataset.view) && this.about.frozen ? true : tab.dataset.view !== "runs" && this.names.length === 0;
      if (mine) {
        tab.setAttribute("aria-current", "page");
        tab.scrollIntoView({ block: "nearest", inline: "nearest" });
      } else tab.removeAttribute("aria-current");
    }
    if (place) window.scrollTo(0, 0);
    this.load().catch((error) => replace(this.live, h("b", { class: "bad" }, error.message)));
  }

  // Show these runs: what is known of one of them is kept.
  async select(names) {
    const known = new Map(this.runs.map((run) => [run.name, run]));
    const states = await this.source.state(names);
    const there = names.filter((_, i) => states[i] !== null);
    this.source.select(there);
    this.names = there;
    this.runs = states.filter((state) => state !== null).map((state, i) => Object.assign(known.get(there[i]) ?? new Run(there[i], state), { state, whole: false, notesOf: undefined }));
    this.samples = new Samples();
    this.texts = new Map();
    this.list = [];
    this.ready = false;
    const { runs } = this;
    this.metering = Promise.all(runs.map((run, i) => this.metrics(run, i)));
    if (!OF_SAMPLES.has(this.place().name)) await this.metering;
    else this.metering.then(() => runs === this.runs && this.update(), () => {}); // `look` tells why they cannot be read
  }

  frame() {
    this.tabs = h("nav", { "aria-label": "views" }, TABS.map(([view, text]) => h("a", { href: `#${view}`, "data-view": view }, text)));
    this.live = h("span", { class: "soft", role: "status" });
    this.main = h("main", { id: "main" });
    this.help = h("dialog", { "aria-label": "Keys" }, h("h2", null, "Keys"),
      h("table", null, KEYS.map(([key, what]) => h("tr", null, h("th", { scope: "row" }, h("kbd", null, key)), h("td", null, what)))),
      h("form", { method: "dialog" }, h("button", null, "Close")));
    return [
      h("header", null, h("a", { class: "brand", href: "#" }, "agentrl"), this.tabs, this.live,
        h("button", { onclick: () => this.recolour(), "aria-label": "dark or light" }, "◐"),
        h("button", { onclick: () => this.help.showModal(), "aria-label": "keys" }, "?")),
      this.main, this.help];
  }

  recolour(theme) {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
    document.documentElement.dataset.theme = theme ?? (now === "dark" ? "light" : "dark");
    try {
      localStorage.setItem("agentrl-theme", document.documentElement.dataset.theme);
    } catch {} // a page opened as a file may not keep anything
  }

  async begin() {
    replace(document.getElementById("app"), this.frame());
    this.about = await this.source.about();
    await this.select(this.place().runs ?? this.about.runs);
    addEventListener("hashchange", (event) => {
      if (location.hash.startsWith("#token=")) return location.reload(); // the address of a server that was started anew
      if (this.name === "samples") this.back = new URL(event.oldURL).hash || "#samples";
      this.open();
    });
    addEventListener("keydown", (event) => this.key(event));
    await this.open();
    if (!this.about.frozen) this.wait();
  }

  wait() {
    setTimeout(async () => {
      try {
        if (!document.hidden) await this.look();
        replace(this.live, this.runs.some((run) => run.state.training) ? h("b", { class: "live" }, "live") : "");
      } catch {
        replace(this.live, h("b", { class: "bad" }, "agentrl view has ended"));
      }
      this.wait();
    }, EVERY);
  }

  async look() {
    const { runs } = this;
    const states = await this.source.state(this.names);
    await this.metering.catch(() => {}); // what failed is asked for again below
    let changed = false;
    for (const [i, run] of runs.entries()) {
      if (runs !== this.runs) return; // others are shown by now
      if (states[i] === null) continue; // it is no more: what is known of it stays
      changed ||= run.state.training !== states[i].training || run.state.recipes.length !== states[i].recipes.length || run.state.checkpoints.length !== states[i].checkpoints.length;
      run.state = states[i];
      changed = (await this.metrics(run, i)) || changed;
    }
    if (changed) this.update();
    await this.view?.look?.();
    await this.load();
  }

  async metrics(run, i) {
    let changed = false;
    const before = run.error;
    run.error = "";
    try {
      for (let more = true; more; ) {
        const found = await this.source.metrics(i, run.next, run.of);
        changed = run.take(found) || changed;
        more = found.more;
      }
    } catch (error) {
      if (!error.answered) throw error;
      run.error = error.message;
    }
    return changed || run.error !== before;
  }

  update() {
    this.view?.update?.();
  }

  // Read what the view needs of files that are new or changed: accuracies, and the index of samples, the newest first.
  async load() {
    if (this.reading === this.runs) return; // that is being done
    const { runs } = this;
    this.reading = runs;
    try {
      for (const [i, run] of runs.entries()) {
        if (runs !== this.runs) return; // others are shown by now
        await this.loadRun(run, i, () => runs === this.runs);
      }
    } finally {
      if (this.reading === runs) this.reading = null;
    }
    if (runs !== this.runs) return;
    if (OF_SAMPLES.has(this.name) && this.runs.some((run) => !run.whole)) return this.load(); // opened meanwhile
    this.ready = true;
    this.view?.ready?.();
    await this.explain();
  }

  // Ask what metrics mean, once what is shown was read.
  async explain() {
    if (this.explained) return;
    this.explained = true;
    try {
      this.meanings = await this.source.meanings();
    } catch (error) {
      if (!error.answered) throw error; // else metrics stand without
    }
    this.update();
  }

  async loadRun(run, i, wanted) {
    const { files } = run.state;
    const evaluations = files.filter((file) => file.evaluation).map((file) => `${file.name} ${file.version}`).join("\n");
    if (evaluations !== (run.evaluated ?? "")) {
      const found = await this.source.evaluations(i);
      if (!wanted()) return;
      Object.assign(run, { evaluations: found, evaluated: evaluations });
      this.update();
    }
    if (!OF_SAMPLES.has(this.name)) return;
    await this.notes(run, i, wanted);
    const before = this.samples.chunks.size;
    this.samples.take(i, files, {});
    const due = files.filter((file) => !this.samples.has(i, file)).reverse();
    for (let k = 0, count = FIRST; k < due.length; k += count, count = AT_ONCE) {
      const part = due.slice(k, k + count);
      const facts = await this.source.index(i, part.map((file) => file.name));
      if (!wanted()) return;
      this.samples.take(i, files, facts);
      this.loading = k + count < due.length ? `reading ${k + count} of ${due.length} files` : "";
      this.samples.build();
      this.update();
    }
    run.whole = true;
    if (due.length === 0 && before !== this.samples.chunks.size) {
      this.samples.build();
      this.update();
    }
  }

  // Read what people said of samples, where that changed.
  async notes(run, i, wanted) {
    const of = run.state.notes;
    if (run.notesOf === of) return;
    const said = of ? await this.source.notes(i) : {};
    if (!wanted()) return;
    run.notesOf = of;
    this.samples.say(i, said);
    this.update();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    const typing = event.target.closest?.("input, select, textarea");
    if (event.key === "Escape" && typing) return event.target.blur();
    if (typing && event.target.type !== "checkbox") return;
    const tab = this.tabs.children[Number(event.key) - 1];
    if (tab && !tab.hidden) location.hash = tab.getAttribute("href");
    else if (event.key === "?") this.help.showModal();
    else if (event.key === "d") this.recolour();
    else if (event.key === "/" && this.view.search) this.view.search.focus();
    else if (this.view.keys?.[event.key]) {
      if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
      this.view.keys[event.key]();
    } else return;
    event.preventDefault();
  }
}

try {
  const kept = localStorage.getItem("agentrl-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch {} // as above

const app = new App(openSource());
globalThis.app = app;
app.begin().catch((error) => replace(document.getElementById("app"), h("p", { class: "empty bad" }, error.message)));

// Where the page's data comes from: the server, or what is embedded in a frozen page. Both give the same.

// The token of the printed address, or of a copied link, which the address then no longer shows. Other tabs of this
// origin find it too.
function token() {
  const [, given, place] = /^#token=([\w-]+)(?:&at=(.*))?$/.exec(location.hash) ?? [];
  if (given) history.replaceState(null, "", place ? `#${place}` : location.pathname);
  try {
    if (given) localStorage.setItem("agentrl-token", given);
    return given ?? localStorage.getItem("agentrl-token") ?? "";
  } catch {
    return given ?? ""; // this browser keeps nothing
  }
}

function server() {
  const key = token();
  const headers = { "X-Agentrl-Token": key };
  async function told(answer) {
    const found = await answer.json().catch(() => ({ error: `${answer.status}` }));
    if (!answer.ok) throw Object.assign(new Error(found.error ?? `${answer.status}`), { answered: true });
    return found;
  }
  const get = async (what, query) => told(await fetch(`api/${what}?${new URLSearchParams(query)}`, { headers }));
  const post = (what, body) => fetch(`api/${what}`, { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) });
  let names = []; // of the runs that are shown: runs are asked for by their place among them
  // What is sent of a run has its name: { run: name of app.runs[run] }.
  const of = (run, what, query) => get(what, { run: names[run] ?? "", ...query });
  return {
    // An address of what is shown that another browser of the same user can open.
    link: () => `${location.origin}/#token=${key}&at=${location.hash.slice(1)}`,
    notes: (run) => of(run, "notes", {}),
    note: async (run, change) => told(await post("note", { ...change, run: names[run] ?? "" })),
    selection: async (body) => {
      const samples = body.samples.map((one) => ({ ...one, run: names[one.run] ?? "" }));
      const answer = await post("selection", { ...body, samples });
      return answer.ok ? answer.blob() : told(answer);
    },
    about: () => get("about", {}),
    meanings: () => get("meanings", {}),
    runs: () => get("runs", {}),
    select: (given) => (names = given),
    state: (given) => (given.length ? get("state", { runs: given.join("\n") }) : []),
    metrics: (run, start, file) => of(run, "metrics", { start, of: file }),
    logs: (run) => of(run, "logs", {}),
    log: (run, name, start, file) => of(run, "log", { name, start, of: file }),
    index: (run, files) => of(run, "index", { files: files.join("\n") }),
    previews: (run, file) => of(run, "previews", { file }),
    sample: (run, file, row) => of(run, "sample", { file, row }),
    spans: (run, file) => of(run, "spans", { file }),
    tools: (run, file) => of(run, "tools", { file }),
    search: (run, text, files) => of(run, "search", { text, files: files.join("\n") }),
    evaluations: (run) => of(run, "evaluations", {}),
    why: (run, file) => of(run, "why", { file }),
  };
}

function frozen(data) {
  const sample = (run, file, row) => {
    const found = data.runs[run].samples[`${file}:${row}`];
    if (found === undefined) throw new Error("not in this page: open the run with agentrl view");
    return found;
  };
  // A sample with its images, of which the page holds each once.
  const pictured = (run, found) => {
    const part = (one) => {
      const key = one?.image_url?.kept;
      return typeof key === "string" && Object.hasOwn(data.runs[run].images, key) ? { ...one, image_url: { url: data.runs[run].images[key] } } : one;
    };
    const message = (one) => (Array.isArray(one?.content) ? { ...one, content: one.content.map(part) } : one);
    return { ...found, told: found.told.map((told) => ({ ...told, messages: told.messages.map(message) })) };
  };
  const texts = (one) => one.told.map((told) => JSON.stringify(told.messages)).join("\n").toLowerCase();
  return {
    about: async () => data.about,
    meanings: async () => data.about.meanings,
    select: () => {},
    state: async () => data.runs.map((run) => run.state),
    metrics: async (run, start) => {
      const rows = start === 0 ? data.runs[run].rows : [];
      return { of: "frozen", start, next: 1, rows, damaged: start === 0 ? data.runs[run].damaged : 0, more: false };
    },
    index: async (run, files) => Object.fromEntries(files.map((file) => [file, data.runs[run].index[file]])),
    previews: async (run, file) => data.runs[run].previews[file] ?? {},
    sample: async (run, file, row) => pictured(run, sample(run, file, row)),
    spans: async (run, file) => {
      const rows = data.runs[run].index[file].at ?? [];
      const known = rows.map((row) => [row, sample(run, file, row).spans]).filter(([, spans]) => spans);
      const zero = known.reduce((least, [, spans]) => spans.reduce((low, span) => Math.min(low, span.start), least), Infinity);
      const found = [];
      for (const [row, spans] of known) found[row] = spans.map(({ part, start, end }) => [part, start - zero, end - zero]);
      return { zero, rows: found };
    },
    search: async (run, text, files) => {
      const wanted = JSON.stringify(text).slice(1, -1).toLowerCase();
      const hits = (file) => {
        const facts = data.runs[run].index[file];
        return (facts.at ?? []).filter((row) => texts(sample(run, file, row)).includes(wanted));
      };
      return Object.fromEntries(files.map((file) => [file, hits(file)]));
    },
    evaluations: async (run) => data.runs[run].evaluations,
    notes: async (run) => data.runs[run].notes,
    tools: async (run, file) => data.runs[run].tools[file] ?? [],
    why: async (run, file) => {
      const found = data.runs[run].why[file];
      if (found === undefined) throw new Error("not in this page: open the run with agentrl view");
      return found;
    },
  };
}

export function openSource() {
  const embedded = document.getElementById("data");
  return embedded === null ? server() : frozen(JSON.parse(embedded.textContent));
}

export const COLUMNS = [
  "task", "group", "sample", "environment", "reward", "solved", "finish", "left_out", "boundary", "tokens",
  "sampled_tokens", "tool_errors", "turns", "calls", "branches", "total_s", "engine_s", "tools_s", "environment_s",
  "hooks_s", "advantage", "scan", "tool", "failed_tool",
];
const SAID = ["label", "note", "notes"]; // columns of what people said

function comparison(values, sign) {
  if (values.some((v) => typeof v === "string")) {
    const ranks = new Map([...new Set(values)].filter((v) => v !== null).sort().map((v, rank) => [v, rank]));
    values = values.map((v) => (v === null ? null : ranks.get(v)));
  }
  const keys = Float64Array.from(values, (v) => (v === null || v === undefined ? Infinity : sign * Number(v)));
  return (a, b) => (keys[a] === keys[b] ? a - b : keys[a] < keys[b] ? -1 : 1);
}

// The short facts of every sample of every run, column by column; sample i is what stands at i of each.
export class Samples {
  constructor() {
    this.chunks = new Map(); // "run\nfile" -> {run, file, facts}
    this.errors = new Map(); // likewise -> line
    this.said = new Map(); // run -> file -> row -> {labels, notes}
    this.clear();
  }

  clear() {
    this.count = 0;
    this.column = Object.fromEntries(["run", "file", "row", "split", "step", "evaluation", ...COLUMNS, ...SAID].map((n) => [n, []]));
    this.built = []; // chunks, in the order of the columns
    this.orders = new Map(); // see sorted
    this.fields = new Map(); // field of a task's data -> its values, some of them where there are many
    this.found = new Map(); // "run\nfile\nrow" -> i
  }

  // Take the files of a run as they are now; facts: file's name -> its index, of those that are new.
  take(run, files, facts) {
    const there = new Set(files.map((file) => `${run}\n${file.name}`));
    for (const key of [...this.chunks.keys()]) {
      if (this.chunks.get(key).run === run && !there.has(key)) this.chunks.delete(key);
    }
    for (const file of files) {
      const key = `${run}\n${file.name}`;
      const one = facts[file.name];
      if (one === undefined || one === null) continue;
      this.errors.delete(key);
      if (one.error !== undefined) this.errors.set(key, one.error);
      this.chunks.set(key, { run, file, facts: one.error === undefined ? one : null });
    }
  }

  has(run, file) {
    return this.chunks.get(`${run}\n${file.name}`)?.file.version === file.version;
  }

  // Put the columns together: only what is new where that comes last, as while a run is read.
  build() {
    const late = this.order();
    const before = late.slice(0, this.built.length);
    if (before.length < this.built.length || before.some((chunk, i) => chunk !== this.built[i])) {
      this.clear();
      this.built = [];
    }
    for (const chunk of late.slice(this.built.length)) this.append(chunk);
    this.built = late;
    this.orders.clear();
    this.tell();
  }

  // Take what people said of a run's samples.
  say(run, said) {
    this.said.set(run, said);
    this.orders.clear();
    this.tell();
  }

  tell() {
    const { label, note, notes } = this.column;
    label.fill(null);
    note.fill(null);
    notes.fill(0);
    for (const [run, files] of this.said) {
      for (const [file, rows] of Object.entries(files)) {
        for (const [row, one] of Object.entries(rows)) {
          const i = this.at(run, file, row);
          if (i === undefined) continue;
          label[i] = [...new Set(one.labels.map(([name]) => name))].join(" ") || null;
          note[i] = one.notes.map(({ text }) => text).join("\n") || null;
          notes[i] = one.notes.length;
        }
      }
    }
  }

  // What people said of a sample: {labels, notes}.
  saidOf(run, file, row) {
    return this.said.get(run)?.[file]?.[row] ?? { labels: [], notes: [] };
  }

  order() {
    const order = [...this.chunks.values()].filter((chunk) => chunk.facts !== null);
    const late = (step) => (step < 0 ? Infinity : step);
    order.sort((a, b) => a.run - b.run || late(b.file.step) - late(a.file.step) || (a.file.split < b.file.split ? -1 : 1));
    return order;
  }

  append({ run, file, facts }) {
    const rows = facts.at ?? null;
    const count = rows === null ? facts.rows : rows.length;
    for (const name of COLUMNS) {
      const values = facts[name];
      const into = this.column[name];
      if (Array.isArray(values)) for (let i = 0; i < count; i++) into.push(values[i]);
      else for (let i = 0; i < count; i++) into.push(values ?? null);
    }
    for (const name of Object.keys(facts.parts)) this.column[`part.${name}`] ??= new Array(this.count).fill(null);
    for (const name of Object.keys(this.column).filter((one) => one.startsWith("part."))) {
      const values = facts.parts[name.slice(5)] ?? null;
      for (let i = 0; i < count; i++) this.column[name].push(Array.isArray(values) ? values[i] : values);
    }
    for (let i = 0; i < count; i++) {
      for (const name of SAID) this.column[name].push(null);
      const row = rows === null ? i : rows[i];
      this.found.set(`${run}\n${file.name}\n${row}`, this.count + i);
      this.column.run.push(run);
      this.column.file.push(file.name);
      this.column.row.push(row);
      this.column.split.push(file.step < 0 ? "in flight" : file.split);
      this.column.step.push(file.step < 0 ? null : file.step);
      this.column.evaluation.push(file.evaluation);
    }
    this.count += count;
    for (const data of Object.values(facts.tasks)) {
      for (const [key, value] of Object.entries(data)) {
        if (!this.fields.has(key)) this.fields.set(key, new Set());
        if (this.fields.get(key).size <= 200) this.fields.get(key).add(value);
      }
    }
  }

  // All samples in the order of a column, those without a value last; "-name": the largest first.
  sorted(sort) {
    if (!this.orders.has(sort)) {
      const name = sort.replace(/^-/, "");
      const field = name.replace(/^data\./, "");
      const values = this.column[name] ?? (this.fields.has(field) ? Array.from({ length: this.count }, (_, i) => this.data(i)[field] ?? null) : undefined);
      const order = Uint32Array.from({ length: this.count }, (_, i) => i);
      if (values !== undefined) order.sort(comparison(values, sort.startsWith("-") ? -1 : 1));
      this.orders.set(sort, order);
    }
    return this.orders.get(sort);
  }

  data(i) {
    const { column } = this;
    return this.chunks.get(`${column.run[i]}\n${column.file[i]}`)?.facts.tasks[column.task[i]] ?? {};
  }

  at(run, file, row) {
    return this.found.get(`${run}\n${file}\n${row}`);
  }

  // The samples of the group of sample i.
  group(i) {
    const { column } = this;
    const same = (k) => column.file[k] === column.file[i] && column.run[k] === column.run[i] && column.task[k] === column.task[i];
    return this.where((k) => same(k) && column.group[k] === column.group[i]);
  }

  // The samples of the task of sample i in its split, over all steps and runs.
  over(i) {
    const { column } = this;
    const [task, split, environment] = [column.task[i], column.split[i], column.environment[i]];
    const same = (k) => column.task[k] === task && column.split[k] === split && column.environment[k] === environment;
    const found = this.where(same);
    return found.sort((a, b) => column.run[a] - column.run[b] || column.step[a] - column.step[b] || column.sample[a] - column.sample[b]);
  }

  where(test) {
    const found = [];
    for (let i = 0; i < this.count; i++) if (test(i)) found.push(i);
    return found;
  }
}

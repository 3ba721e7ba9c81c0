// Why samples are unsolved: what they have more often than solved samples do.

import { h, choice, percent, replace } from "./dom.js";

const TOLD = {
  field: "a field of the task",
  finish: "how it ended",
  "tool error": "an error of a tool",
  calls: "what it called",
  slow: "a slow call",
  says: "a phrase that it says",
  scan: "what a scanner found",
  files: "a change of its workspace",
  miscopied: "a number copied wrongly",
  "made up": "something that stands nowhere",
  unsure: "where the sampled probability fell",
};

function bar(share, kind, label) {
  return h("div", { class: "share" }, h("span", { class: "soft" }, label), h("span", { class: "track" }, h("i", { class: kind, style: { width: `${100 * share}%` } })), h("b", null, percent(share)));
}

function change(cause) {
  if (cause.before === null || cause.before === undefined) return null;
  const points = 100 * (cause.share - cause.before);
  const way = Math.abs(points) < 0.05 ? "as before" : `${points > 0 ? "+" : ""}${points.toFixed(1)} points since the first evaluation`;
  return h("span", { class: "soft" }, `${way} (${percent(cause.before)}, ${cause.unsolved_before} unsolved then)`);
}

export function errorsView(app, params) {
  const state = { ...params };
  const { samples } = app;
  const bars = h("div", { class: "bar" });
  const body = h("div");
  let told = "";

  // The newest file of each split, evaluations with the lowest accuracy first, then training.
  function files() {
    return app.runs.flatMap((run, i) => {
      const newest = new Map();
      for (const file of run.state.files) if (file.step >= 0) newest.set(file.split, file);
      const rate = (file) => run.evaluations.find((one) => one.file === file.name)?.accuracy ?? (file.evaluation ? 1 : 2);
      return [...newest.values()].sort((a, b) => rate(a) - rate(b)).map((file) => ({ run: i, file, key: `${i}\n${file.name}`,
        text: `${app.runs.length > 1 ? `${run.name}, ` : ""}${file.split}, step ${file.step}` }));
    });
  }

  // The samples of a file by task and number.
  function placesOf(run, file) {
    const { column } = samples;
    return new Map(samples.where((i) => column.run[i] === run && column.file[i] === file).map((i) => [`${column.task[i]}\n${column.sample[i]}`, i]));
  }

  function examples(places, cause) {
    return h("ul", { class: "examples" }, cause.examples.map((one) => {
      const i = places.get(`${one.task}\n${one.sample}`);
      const name = `${one.task}${one.sample ? ` #${one.sample}` : ""}`;
      return h("li", null, i === undefined ? name : h("a", { href: app.linkOf(i) }, name), " ", h("code", null, one.note));
    }));
  }

  function block(places, found, cause, open) {
    const count = `${cause.unsolved} of ${found.unsolved} unsolved, ${cause.tasks} tasks`;
    return h("details", { open: open ? true : null, class: "cause" },
      h("summary", null, h("span", { class: "tag" }, TOLD[cause.kind] ?? cause.kind), " ", h("b", null, cause.value), " ", h("span", { class: "soft" }, count)),
      h("div", { class: "shares" }, bar(cause.share, "unsolved", "of unsolved"), bar(cause.solved, "solved", "of solved samples")),
      h("p", null, change(cause)),
      examples(places, cause));
  }

  function draw({ run }, found) {
    const places = placesOf(run, found.file);
    const share = found.samples ? found.unsolved / found.samples : 0;
    const before = found.first_file && found.first_samples ? ` In the first evaluation: ${found.first_unsolved} of ${found.first_samples} (${percent(found.first_unsolved / found.first_samples)}).` : "";
    const below = found.below === null || found.below === undefined ? "" : ` A sample counts as unsolved below the mean reward, ${found.below.toFixed(3)}.`;
    replace(body,
      h("p", null, h("b", null, `${found.unsolved} of ${found.samples} samples are unsolved (${percent(share)}).`), before, below,
        found.lost ? h("span", { class: "bad" }, ` ${found.lost} more were lost to errors that are not the model's.`) : null),
      (found.faults ?? []).map((fault) => h("p", { class: "bad" }, `${fault.line}. Likely cause: ${fault.remedy}.`)),
      Object.entries(found.errors ?? {}).map(([line, count]) => h("p", { class: "soft" }, `${count} lost: ${line}`)),
      h("p", { class: "soft" }, "Each line is something that unsolved samples have more often than solved ones, and not by chance. Open it for examples."),
      found.causes.map((cause, k) => block(places, found, cause, k === 0)),
      found.causes.length === 0 ? h("p", { class: "empty" }, found.unsolved ? "Nothing sets the unsolved samples apart from the solved ones." : "Every sample is solved.") : null,
      found.unexplained && found.causes.length ? h("p", { class: "soft" }, `${found.unexplained} unsolved samples have none of these. `) : null,
      found.gone?.length ? [h("h2", null, "Gone since the first evaluation"), found.gone.map((cause) => block(places, found, cause, false))] : null,
      found.notes.map((line) => h("p", { class: "soft" }, line)));
  }

  async function update() {
    const there = files();
    const now = there.find(({ key }) => key === state.of) ?? there[0];
    const facing = now ? `${now.key}\n${now.file.version}\n${samples.count}` : "";
    if (facing === told) return;
    told = facing;
    if (!now) return replace(body, h("p", { class: "empty" }, app.ready ? "No conversation is stored yet." : "Reading…"));
    replace(bars, h("h1", null, "Why samples are unsolved"), choice("of", there.map(({ key, text }) => [key, text]), now.key, (of) => {
      Object.assign(state, { of });
      app.remember(state);
      replace(body, h("p", { class: "empty" }, "Reading…"));
      update();
    }));
    try {
      const found = await app.source.why(now.run, now.file.name);
      if (told === facing) draw(now, found);
    } catch (error) {
      if (told === facing) replace(body, h("p", { class: "empty bad" }, error.message));
    }
  }

  update();
  return { element: h("div", { class: "view" }, bars, body), title: "Errors", update, ready: update };
}

// What a run, its workers and its servers said, as it is written.

import { h, choice, replace, later } from "./dom.js";

const MOST = 2 << 20; // characters that are kept

export function logView(app, params) {
  const state = { ...params };
  const bar = h("div", { class: "bar" });
  const told = h("p", { class: "soft", role: "status" });
  const text = h("pre", { class: "data log", tabindex: 0, role: "region", "aria-label": "log" });
  const box = h("input", { type: "search", class: "wide", value: state.q ?? "", placeholder: "lines that contain", "aria-label": "filter lines", oninput: later(80, () => {
    state.q = box.value;
    app.remember(state);
    draw();
  }) });
  let known = "", said = "", next = 0, of = "", leftOut = 0, busy = false, drawn = "";

  function draw() {
    const wanted = (state.q ?? "").toLowerCase();
    const shown = wanted ? said.split("\n").filter((line) => line.toLowerCase().includes(wanted)).join("\n") : said;
    replace(told, leftOut ? `The first ${leftOut.toLocaleString("en-US")} bytes are left out. ` : "", wanted ? `${shown ? shown.split("\n").length : 0} lines contain it.` : "");
    told.hidden = !told.textContent;
    if (shown === drawn) return;
    const follows = drawn === "" || text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    text.textContent = drawn = shown;
    if (follows) text.scrollTop = text.scrollHeight;
  }

  function controls(run, logs) {
    const found = JSON.stringify([run, logs.map((one) => one.name)]);
    if (found === known) return;
    known = found;
    const set = (name) => (value) => {
      state[name] = value;
      if (name === "run") delete state.name;
      app.remember(state);
      [said, drawn, next, of] = ["", "", 0, ""];
      look();
    };
    replace(bar, app.runs.length > 1 && choice("run", app.runs.map((one, i) => [String(i), one.name]), String(run), set("run")),
      logs.length > 0 && choice("log", logs.map(({ name }) => [name, name]), state.name, set("name")), box);
  }

  async function look() {
    if (busy) return;
    busy = true;
    try {
      const run = Math.min(Number(state.run ?? 0) || 0, app.runs.length - 1);
      const logs = await app.source.logs(run);
      controls(run, logs);
      const name = logs.some((one) => one.name === state.name) ? state.name : logs[0]?.name;
      if (name === undefined) {
        said = "";
        text.textContent = "Nothing was written down of what this run said.";
        return;
      }
      const found = await app.source.log(run, name, next, of);
      if (found.start === 0) [said, leftOut] = ["", 0];
      leftOut += found.left_out;
      said = (found.left_out ? found.text : said + found.text).slice(-MOST);
      [next, of] = [found.next, found.of];
      draw();
    } catch (error) {
      if (!error.answered) throw error;
      replace(told, h("span", { class: "bad" }, error.message));
      told.hidden = false;
    } finally {
      busy = false;
    }
  }

  const element = h("div", { class: "view full" }, h("h1", { class: "hidden" }, "Log"), bar, told, text);
  return { element, title: "Log", look, shown: () => look().catch(() => {}), search: box };
}

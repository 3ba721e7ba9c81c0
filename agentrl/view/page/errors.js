// Why samples failed.

import { h } from "./dom.js";

export function errorsView(app) {
  return { element: h("div", { class: "view" }, h("p", { class: "empty" }, "…")), title: "Errors" };
}

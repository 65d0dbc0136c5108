// The keyboard: j and k go through what a view lists, enter opens, escape goes up, / searches, ? says all of this.

import { element } from "./dom.js";
import { address } from "./routes.js";

const KEYS = [
  ["j  k", "the next, the one before: episodes, acts, steps"],
  ["enter", "open it"],
  ["escape", "back up: from a part to its episode, from there to the list"],
  ["/", "search"],
  ["1 … 4", "parts of an episode: conversation, tokens, why, group and children"],
  ["[  ]", "the episode before or after it in the list"],
  ["←  →", "the token before, the next one"],
  ["g  then  o e s v f c", "overview, episodes, steps, evaluations, forks, compare episodes"],
  ["d", "dark or light"],
  ["?", "this"],
];
const VIEWS = { o: "overview", v: "evaluations", e: "episodes", s: "steps", f: "forks", c: "compare", r: "runs" };

/** Listen; `page` is what the keys act on. */
export function listenToKeys(page) {
  let isLeading = false;
  const act = {
    j: () => move(1),
    k: () => move(-1),
    Enter: (event) => open(event, page),
    Escape: () => page.up(),
    "/": () => page.search(),
    "?": help,
    d: () => page.toggleTheme(),
    "[": () => document.getElementById("before")?.click(),
    "]": () => document.getElementById("after")?.click(),
    g: () => (isLeading = true),
  };
  for (const place of [1, 2, 3, 4]) act[place] = () => document.querySelectorAll(".tabs a")[place - 1]?.click();
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const wasLeading = isLeading;
    isLeading = false;
    if (event.target.matches?.("input, textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (document.getElementById("help").open && event.key !== "?") return;
    if (wasLeading && VIEWS[event.key]) page.go(address([VIEWS[event.key]]));
    else if (Object.hasOwn(act, event.key) && act[event.key](event) !== false) event.preventDefault();
  });
}

/** Focus the next of what the view lists. */
function move(by) {
  const items = [...document.querySelectorAll("#main [data-item]")].filter((item) => item.offsetParent !== null);
  if (!items.length) return;
  const current = items.findIndex((item) => item.contains(document.activeElement) || item.classList.contains("selected"));
  const next = items[Math.min(Math.max(current + by, 0), items.length - 1)];
  items.forEach((item) => item.classList.toggle("selected", item === next));
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function open(event, page) {
  if (event.target.matches?.("a, button, summary")) return false;
  const to = event.target.closest?.("[data-to]")?.dataset.to;
  if (to) page.go(to);
  return Boolean(to);
}

function help() {
  const dialog = document.getElementById("help");
  if (dialog.open) return dialog.close();
  const close = element("button", { type: "button", on: { click: () => dialog.close() } }, "Close");
  dialog.replaceChildren(element("h2", {}, "Keys"), element("dl", { class: "keys" }, KEYS.map(([key, what]) => element("div", {}, element("dt", {}, element("kbd", {}, key)), element("dd", {}, what)))), close);
  return dialog.showModal();
}

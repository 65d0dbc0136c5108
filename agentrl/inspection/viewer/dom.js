// The one place where elements are made. Whatever comes out of a run enters as a text node, and in no other way.

import { pieces, safeText } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const LONG = 20_000; // characters of a content block that are shown at first
const SHORT = 2_000; // of any other text
const HINT = 500; // of a title or a label

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "css") for (const [key, amount] of Object.entries(value)) node.style.setProperty(key, String(amount));
    else if (name === "href" && !String(value).startsWith("#/")) throw new Error("links lead to views of this page only");
    else node.setAttribute(name, value === true ? "" : safeText(name === "title" || name === "aria-label" ? clipped(String(value), HINT) : value));
  }
  append(node, children);
  return node;
}

/** Add children: elements, text, or lists of both; null and false are left out. */
export function append(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) node.append(child);
    else appendText(node, clipped(String(child), SHORT));
  }
}

function clipped(text, most) {
  return text.length <= most ? text : `${text.slice(0, most)} … and ${(text.length - most).toLocaleString("en-US")} more characters`;
}

function appendText(node, text) {
  for (const [piece, isEscape] of pieces(text)) {
    if (!isEscape) node.append(document.createTextNode(piece));
    else {
      const mark = document.createElement("span");
      mark.className = "escape";
      mark.append(document.createTextNode(piece));
      node.append(mark);
    }
  }
}

/** An element with attributes, listeners (`on`), custom properties of style (`css`) and children. */
export function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for a drawing. */
export function drawing(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

export function replace(node, ...children) {
  node.replaceChildren();
  append(node, children);
}

/** What was written, as it was written; of a very long text the beginning, and a button for more. */
export function content(text, className = "content") {
  const block = element("pre", { class: className, dir: "auto" });
  let shown = 0;
  const more = element("button", { type: "button", class: "more", on: { click: extend } });
  const holder = element("div", { class: "written" }, block, more);
  function extend() {
    const until = Math.min(text.length, shown ? shown + 10 * LONG : LONG);
    appendText(block, text.slice(shown, until));
    shown = until;
    more.hidden = shown >= text.length;
    more.textContent = `${(text.length - shown).toLocaleString("en-US")} more characters`;
  }
  extend();
  return holder;
}

/** Names and what they are. */
export function facts(entries, className = "facts") {
  const known = entries.filter((entry) => entry && entry[1] !== null && entry[1] !== undefined && entry[1] !== "");
  return element("dl", { class: className }, known.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/** What could not be read. */
export function problems(found) {
  return (found ?? []).map((problem) => element("p", { class: "problem", role: "alert" }, element("b", {}, "Not readable. "), problem));
}

export function chip(text, kind = "", title = null) {
  return element("span", { class: `chip ${kind}`, title }, text);
}

/** Whether an episode earned nothing: it was dropped, or its reward is 0 or less. */
export function isFailed(line) {
  return Boolean(line.drop_reason && !line.stop_reason) || (line.reward !== null && line.reward !== undefined && line.reward <= 0);
}

/** The status of an episode; one that is finished was an evaluation or a fork. */
export function statusLabel(name, line = null) {
  const label = name === "finished" && line?.purpose === "evaluate" ? "evaluated" : name.replaceAll("_", " ");
  return element("span", { class: `status ${name}`, title: name === "finished" ? "status = finished" : null }, label);
}

/** The status of an episode, and beside it whether the episode failed. */
export function status(name, line) {
  return [statusLabel(name, line), isFailed(line) ? element("span", { class: "failure" }, "✕ failed") : null];
}

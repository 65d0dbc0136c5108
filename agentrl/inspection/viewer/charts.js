// Drawings of numbers: lines, areas, dots. Each is as wide as its place and says in words what it shows.

import { drawing, element } from "./dom.js";
import { number } from "./text.js";

const WIDTH = 600;

/** A chart: `series` of { hue, points: [[x, y]], kind: "line" | "area" | "bars" | "dots", width: that a point stands for }. */
export function chart(title, series, { height = 90, low = null, high = null, from = null, to = null, label = number, marks = [], ends = null } = {}) {
  const points = series.flatMap((each) => each.points).filter(([, y]) => y !== null && Number.isFinite(y));
  if (!points.length) return element("p", { class: "quiet" }, "nothing was recorded");
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [left, right] = [from ?? least(xs), to ?? most(xs)];
  const bottom = Math.min(low ?? Infinity, least(ys));
  const top = Math.max(high ?? -Infinity, most(ys), bottom + 1e-9);
  const x = (value) => (right > left ? ((value - left) / (right - left)) * WIDTH : WIDTH / 2);
  const y = (value) => height - 3 - ((value - bottom) / (top - bottom)) * (height - 6);
  const shapes = series.map((each) => shape(each, x, y, bottom));
  const lines = marks.map((mark) => drawing("line", { class: "mark", x1: x(mark), x2: x(mark), y1: 0, y2: height }));
  const summary = `${title}: from ${label(least(ys))} to ${label(most(ys))}`;
  return element(
    "div",
    { class: "chart" },
    element("div", { class: "labels", "aria-hidden": "true" }, element("span", {}, label(top)), element("span", {}, label(bottom))),
    drawing("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": summary, css: { height: `${height}px` } }, lines, shapes),
    ends ? element("div", { class: "ends" }, ends.map((text) => element("span", {}, text))) : null,
  );
}

function shape({ kind = "line", hue = "", points, width = 0 }, x, y, bottom) {
  const known = points.filter(([, value]) => value !== null && Number.isFinite(value));
  if (kind === "dots") return known.map(([px, py]) => drawing("line", { class: `dot ${hue}`, x1: x(px), x2: x(px) + 0.01, y1: y(py), y2: y(py) }));
  if (kind === "bars") return known.filter(([, py]) => py > bottom).map(([px, py]) => drawing("line", { class: `column ${hue}`, x1: x(px), x2: x(px), y1: y(bottom), y2: y(py) }));
  return (width ? stretches(points) : [known]).filter((stretch) => stretch.length).map((stretch) => {
    const path = stretch.map(([px, py], place) => `${place ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}${width ? `H${x(px + width).toFixed(1)}` : ""}`).join("");
    if (kind === "line") return drawing("path", { class: `curve ${hue}`, d: path });
    const [first, last] = [stretch[0], stretch[stretch.length - 1]];
    return drawing("path", { class: `area ${hue}`, d: `${path}L${x(last[0] + width)} ${y(bottom)}L${x(first[0])} ${y(bottom)}Z` });
  });
}

/** Points that follow each other with nothing unknown between them. */
function stretches(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] !== null && Number.isFinite(point[1])) found[found.length - 1].push(point);
    else found.push([]);
  }
  return found;
}

export function least(values) {
  return values.reduce((found, value) => Math.min(found, value), Infinity);
}

export function most(values) {
  return values.reduce((found, value) => Math.max(found, value), -Infinity);
}

/** Names of what a chart shows, with their hues. */
export function legend(names) {
  return element("ul", { class: "legend" }, names.map(([name, hue, what]) => element("li", {}, element("i", { class: `swatch ${hue}`, "aria-hidden": "true" }), name, what ? element("span", { class: "quiet" }, ` ${what}`) : null)));
}

/** A part of the page about one thing. */
export function card(title, ...children) {
  return element("section", { class: "card" }, title ? element("h2", {}, title) : null, children);
}

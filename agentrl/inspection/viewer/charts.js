// Drawings of numbers: lines with points, error bars and bands, dots, bars. Each has round ticks on both axes, a legend
// for every series, and says in words what it shows.

import { drawing, element } from "./dom.js";
import { number, seconds } from "./text.js";

const WIDTH = 600;
const POINTS = 60; // a line of more points is drawn without a mark for each
const TICKS = 4;
const NOISE = 1e-12; // smaller values are rounding errors of sums that are 0
const CLOSE = 0.3; // of the median distance: a point that follows its neighbor this closely is drawn beside the line
const MINUTE = 60;
const TIMES = [1, 2, 5, 10, 15, 30].flatMap((count) => [count, count * MINUTE]).concat([1, 2, 3, 6, 12, 24, 48, 120, 240].map((hours) => hours * MINUTE * MINUTE)).sort((a, b) => a - b);

/**
 * A chart of `series`: { name, hue, points: [[x, y, error]], kind, width }. A kind is "line", "band" (a line with its
 * errors as an area), "dots" or "bars"; `width` is the span that a point stands for.
 *
 * The vertical axis contains 0, and ends at 1 where `share` says that 1 is the maximum: nothing is cropped; `percent` labels it 100 %. `axis` names
 * what runs to the right: "step", "tokens", "seconds" or "place". `marks` are { name, hue, at: [x] }.
 */
export function chart(title, series, { height = 120, share = false, percent = false, from = null, to = null, axis = "step", marks = [] } = {}) {
  const known = series.map((each) => ({ ...each, points: each.points.map(([x, y, error = 0]) => [x, Math.abs(y) < NOISE && y !== null ? 0 : y, error ?? 0]) }));
  const points = known.flatMap((each) => each.points).filter(isKnown);
  if (!points.length) return element("p", { class: "quiet" }, "nothing was recorded");
  const [xs, ys] = [points.map(([x]) => x), points.flatMap(([, y, error]) => [y - error, y + error])];
  const [left, right] = [from ?? least(xs), to ?? most(xs)];
  const vertical = share ? [0, 0.25, 0.5, 0.75, 1] : roundTicks(Math.min(0, least(ys)), Math.max(0, most(ys)));
  const round = axis === "seconds" ? timeTicks(left, right) : roundTicks(left, right, { within: true, whole: true });
  const isFirstFree = axis === "step" && round.length > 1 && round[0] - left >= 0.5 * (round[1] - round[0]);
  const horizontal = isFirstFree ? [left, ...round] : round; // the first step, unless its label would touch the next
  const [bottom, top] = [vertical[0], vertical[vertical.length - 1]];
  const x = (value) => (right > left ? ((value - left) / (right - left)) * WIDTH : WIDTH / 2);
  const y = (value) => height - ((Math.min(Math.max(value, bottom), top) - bottom) / (top - bottom)) * height;
  const grid = vertical.map((value) => drawing("line", { class: value === 0 ? "grid zero" : "grid", x1: 0, x2: WIDTH, y1: y(value), y2: y(value) }));
  const lines = marks.flatMap(({ hue, at }) => at.map((value) => drawing("line", { class: `mark ${hue ?? ""}`, x1: x(value), x2: x(value), y1: 0, y2: height })));
  const shapes = known.map((each) => shape(each, x, y));
  const label = (value) => (percent ? `${Math.round(value * 100)} %` : tickText(value, vertical));
  const values = points.map(([, value]) => value);
  const summary = `${title}: from ${number(least(values))} to ${number(most(values))}`;
  const names = [...known.filter((each) => each.name).map((each) => [each.name, each.hue, each.what ?? "", each.kind ?? "line"]), ...marks.filter((mark) => mark.at.length).map((mark) => [mark.name, mark.hue ?? "", "", "mark"])];
  return element(
    "div",
    { class: "plot" },
    names.length ? legend(names) : null,
    element(
      "div",
      { class: "chart" },
      element("div", { class: "labels", "aria-hidden": "true" }, vertical.map((value) => element("span", { css: { "--at": `${(y(value) / height) * 100}%` } }, label(value)))),
      drawing("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": summary, css: { height: `${height}px` } }, grid, lines, shapes),
      element("div", { class: "ticks", "aria-hidden": "true" }, horizontal.map((value) => element("span", { css: { "--at": `${(x(value) / WIDTH) * 100}%` } }, axis === "seconds" ? timeText(value) : tickText(value, horizontal))), element("i", {}, axis === "seconds" ? "time" : axis)),
    ),
  );
}

function isKnown([, y]) {
  return y !== null && y !== undefined && Number.isFinite(y);
}

function shape({ kind = "line", hue = "", points, width = 0, isSparse = false }, x, y) {
  const known = points.filter(isKnown);
  const dot = ([px, py]) => drawing("line", { class: `dot ${hue}`, x1: x(px), x2: x(px) + 0.01, y1: y(py), y2: y(py) });
  if (kind === "dots") return known.map(dot);
  if (kind === "bars") return known.filter(([, py]) => py > 0).map(([px, py]) => drawing("line", { class: `column ${hue}`, x1: x(px + width / 2), x2: x(px + width / 2), y1: y(0), y2: y(py) }));
  // A sparse series has a gap where its values are no longer of the same tasks.
  const stretches = (width || isSparse ? split(points) : [known]).map((stretch) => (isSparse ? spaced(stretch) : stretch)).filter((stretch) => stretch.length);
  const curves = stretches.map((stretch) => drawing("path", { class: `curve ${hue}`, d: stretch.map(([px, py], place) => `${place ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}${width ? `H${x(px + width).toFixed(1)}` : ""}`).join("") }));
  const isEstimate = known.some(([, , error]) => error > 0);
  if (kind === "band" && isEstimate && known.length > 1) {
    const edge = (sign, order) => order.map(([px, py, error]) => `${x(px).toFixed(1)} ${y(py + sign * error).toFixed(1)}`);
    return [drawing("path", { class: `band ${hue}`, d: `M${[...edge(1, known), ...edge(-1, [...known].reverse())].join("L")}Z` }), ...curves];
  }
  const errors = isEstimate ? known.filter(([, , error]) => error > 0).map(([px, py, error]) => drawing("line", { class: `error ${hue}`, x1: x(px), x2: x(px), y1: y(py - error), y2: y(py + error) })) : [];
  return [...curves, ...errors, ...(!width && (known.length <= POINTS || isEstimate) ? known.map(dot) : [])];
}

/** Points that follow each other with nothing unknown between them. */
function split(points) {
  const found = [[]];
  for (const point of points) {
    if (isKnown(point)) found[found.length - 1].push(point);
    else found.push([]);
  }
  return found;
}

/** Points at their usual distance: one that closely follows another would put a kink of mere chance into the line. */
export function spaced(points) {
  const distances = points.slice(1).map(([x], place) => x - points[place][0]).sort((a, b) => a - b);
  const usual = distances[Math.floor(distances.length / 2)] ?? 0;
  const kept = [];
  for (const point of [...points].reverse()) if (!kept.length || kept[0][0] - point[0] > usual * CLOSE) kept.unshift(point);
  return kept;
}

const EXCESS = 0.03; // of a tick's distance: so little beyond the last tick makes no room for another

/** Round numbers that enclose a range, or lie within it. */
export function roundTicks(low, high, { within = false, whole = false } = {}) {
  if (!(high > low)) return within ? [low] : low === 0 ? [0, 1] : low < 0 ? [2 * low, low, 0] : [0, low, 2 * low];
  const rough = (high - low) / TICKS;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 2.5, 5, 10].find((factor) => factor * unit >= rough * 0.999 && (factor !== 2.5 || !whole)) * unit, whole ? 1 : 0);
  const first = within ? Math.ceil(low / step - 1e-9) : Math.floor(low / step + EXCESS);
  const last = within ? Math.floor(high / step + 1e-9) : Math.ceil(high / step - EXCESS);
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

function timeTicks(low, high) {
  const step = TIMES.find((time) => time >= (high - low) / 6) ?? TIMES[TIMES.length - 1];
  if (high - low < 6) return roundTicks(low, high, { within: true });
  return Array.from({ length: Math.floor((high - low) / step) + 1 }, (_, place) => Math.ceil(low / step) * step + place * step).filter((time) => time <= high);
}

function timeText(value) {
  if (value < MINUTE) return value === 0 ? "0" : seconds(value);
  return value < MINUTE ** 2 ? `${number(value / MINUTE)} min` : `${number(value / MINUTE ** 2)} h`;
}

/** A tick with as many digits as tell it from the next one. */
export function tickText(value, ticks) {
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(value) || 1;
  const largest = most(ticks.map(Math.abs));
  if (value === 0) return "0";
  if (largest < 1e-3 || largest >= 1e7) return value.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(step) + 1e-9) + (isTwoAndHalf(step) ? 1 : 0))).replace(/-/g, "−");
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (isTwoAndHalf(step) ? 1 : 0));
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
}

function isTwoAndHalf(step) {
  return String(Number(step.toPrecision(6))).replace(/[^1-9]/g, "").startsWith("25");
}

export function least(values) {
  return values.reduce((found, value) => Math.min(found, value), Infinity);
}

export function most(values) {
  return values.reduce((found, value) => Math.max(found, value), -Infinity);
}

/** Names of what a chart shows, with their hues. */
export function legend(names) {
  return element("ul", { class: "legend" }, names.map(([name, hue, what, kind = ""]) => element("li", {}, element("i", { class: `swatch ${hue} ${kind}`, "aria-hidden": "true" }), name, what ? element("span", { class: "quiet" }, ` ${what}`) : null)));
}

/** A part of the page about one thing. */
export function card(title, ...children) {
  return element("section", { class: "card" }, title ? element("h2", {}, title) : null, children);
}

// Colors that mean something: versions by hue, quantities by how strong a tint is. The style sheet has the hues.

import { fixed, number } from "./text.js";
import { element } from "./dom.js";

const HUES = 8;
const ORDER = [0, 1, 2, 3, 5, 7, 4, 6]; // the last are those of seats

/** A hue for each version of some list, in order; the same for the same list. */
export function palette(versions) {
  const order = [...new Set(versions.filter(Boolean))].sort(byStep);
  return new Map(order.map((version, place) => [version, `hue${ORDER[place % HUES]}`]));
}

function byStep(left, right) {
  const [one, other] = [left, right].map((version) => version.split(/[@.]/));
  return one[0].localeCompare(other[0]) || one[1] - other[1] || one[2] - other[2];
}

export function versionChip(version, hues) {
  return element("span", { class: `chip version ${hues?.get(version) ?? ""}` }, version);
}

/** Ways to paint tokens: what each needs, how strong its tint is, and what its legend says. */
export const PAINTS = [
  { name: "version", label: "version", needs: "version", tells: "the weights that sampled it" },
  { name: "surprise", label: "log-probability", needs: "logprob", kind: "heat", strength: (value) => -value / 5, tells: "the less likely, the stronger; full at −5" },
  { name: "entropy", label: "entropy", needs: "entropy", kind: "heat", strength: (value) => value / 3, tells: "the higher, the stronger" },
  { name: "advantage", label: "advantage", needs: "advantage", kind: "signed", tells: "raised in green, lowered in red" },
  { name: "ratio", label: "ratio", needs: "ratio", kind: "signed", value: (ratio) => Math.log(ratio), tells: "more likely now in green, less likely in red" },
  { name: "kept", label: "kept set", needs: "kept", kind: "heat", strength: (value) => (value < 0 ? 1 : Math.log2(value) / 10), tells: "the more tokens the filters left, the stronger" },
  { name: "lag", label: "staleness", needs: "lag", kind: "heat", strength: (value) => value / 8, tells: "steps behind when it was trained" },
  { name: "routing", label: "routing", needs: "routing", tells: "alike where its experts were" },
  { name: "mask", label: "loss mask", needs: "loss_mask", tells: "what was sampled, and can be trained" },
];

/** A function that paints token `at` of a row: sets the class and the strength of its element. */
export function painter(name, columns, hues) {
  const paint = PAINTS.find((each) => each.name === name) ?? PAINTS[0];
  const values = columns[paint.needs] ?? [];
  const signed = paint.kind === "signed" ? values.filter((value) => value !== null).map(paint.value ?? Number) : [];
  const largest = signed.reduce((most, value) => Math.max(most, Math.abs(value)), paint.name === "ratio" ? 0.1 : 1e-9);
  return (node, at) => {
    const value = values[at];
    if (value === null || value === undefined || value === false) return;
    if (paint.kind === "heat") tint(node, "heat", paint.strength(value));
    else if (paint.kind === "signed") {
      const amount = (paint.value ?? Number)(value);
      tint(node, amount < 0 ? "lowered" : "raised", Math.abs(amount) / largest);
    } else node.classList.add(paint.name === "version" ? hues.get(value) : paint.name === "routing" ? hue(value) : "marked");
  };
}

function tint(node, className, strength) {
  node.classList.add(className);
  node.style.setProperty("--strength", `${Math.round(Math.min(Math.max(strength, 0), 1) * 100)}%`);
}

function hue(digest) {
  return `hue${parseInt(digest.slice(0, 4), 16) % HUES}`;
}

/** A reward or an advantage by itself: red below nothing. */
export function signed(value, decimals = null) {
  return element("span", { class: `amount ${value < 0 ? "bad" : ""}` }, decimals === null ? number(value) : fixed(value, decimals));
}

/** The rewards of an episode as numbers: one, or one of each seat if several were rewarded. */
export function rewardsOf(line) {
  const rewards = Object.values(line.rewards);
  return rewards.length > 1 ? rewards : line.reward === null ? [] : [line.reward];
}

/** The reward of an episode, or of each seat with its name if several were rewarded. */
export function rewards(line) {
  const seats = Object.entries(line.rewards);
  if (seats.length < 2) return line.reward === null ? null : signed(line.reward);
  return seats.map(([seat, reward], place) => [place ? " · " : "", element("span", { class: "quiet" }, seat), " ", signed(reward)]);
}

/** The same with bars. */
export function rewardBars(line, largest) {
  const seats = Object.entries(line.rewards);
  if (seats.length < 2) return signedBar(line.reward, largest, 3);
  return seats.map(([seat, reward]) => [element("span", { class: "quiet" }, seat), signedBar(reward, largest, 3)]);
}

/** A number with a bar that starts in the middle, for comparing it with those above and below it. */
export function signedBar(value, largest = 1, decimals = null) {
  if (value === null || value === undefined) return element("span", { class: "quiet" }, "–");
  const share = Math.min(Math.abs(value) / (largest || 1), 1) * 50;
  const bar = element("span", { class: `bar ${value < 0 ? "below" : "above"}`, css: { "--share": `${share}%` }, "aria-hidden": "true" });
  return element("span", { class: "signed" }, signed(value, decimals), bar);
}

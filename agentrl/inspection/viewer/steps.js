// Optimizer steps: how they went, and what one was fed and did.

import { chip, element, facts, problems, replace } from "./dom.js";
import { clock, fixed, number, seconds } from "./text.js";
import { rewardBars, rewards, signedBar } from "./colors.js";
import { address, episodeAddress } from "./routes.js";
import { card, chart, most } from "./charts.js";
import { isShare } from "./series.js";

const PAGE = 50;

/** The charts of all steps; below, the newest steps first. */
export async function stepsView(page) {
  const steps = await page.ask("steps");
  if (!steps.length) return { title: "Steps", content: element("p", { class: "quiet" }, "No step has been taken yet.") };
  const policies = [...new Set(steps.map((step) => step.policy))].sort();
  const surviving = steps.filter((step) => step.survives);
  // A step has a reward, or, if it has none because its episodes have several seats, one of each seat.
  const rewardsOf = ({ policy, reward, rewards: bySeat }) => (reward === null ? Object.entries(bySeat).map(([seat, of]) => [policies.length > 1 ? `${policy}/${seat}` : seat, of]) : [[policy, reward]]);
  const curve = (title, valuesOf, isOfShares) => {
    const points = new Map();
    for (const step of surviving) for (const [name, value] of valuesOf(step)) points.set(name, [...(points.get(name) ?? []), [step.step, value]]);
    const series = [...points].map(([name, of], place) => ({ name, hue: `hue${place}`, points: of }));
    return card(title, chart(title, series, { share: isOfShares && isShare("reward", series.flatMap((each) => each.points)) }));
  };
  // A server has one policy for each base, and several models of it, each a lineage with steps of its own.
  const counts = new Map();
  for (const { policy, step } of surviving) counts.set(`${policy} ${step}`, (counts.get(`${policy} ${step}`) ?? 0) + 1);
  const several = new Set(surviving.filter(({ policy, step }) => counts.get(`${policy} ${step}`) > 1).map(({ policy }) => policy));
  const nameOf = ({ policy, lineage }) => (several.has(policy) ? `${policy}@${lineage}` : policy);
  const newest = [...steps].reverse();
  const holder = element("div");
  const more = element("button", { type: "button", class: "more", on: { click: () => extend() } });
  let shown = 0;
  function extend() {
    shown = Math.min(shown + PAGE, newest.length);
    replace(holder, table(HEADINGS, newest.slice(0, shown).map(stepRow), NUMERIC));
    more.hidden = shown === newest.length;
    more.textContent = `Show ${number(Math.min(PAGE, newest.length - shown))} more of ${number(newest.length)} steps`;
  }
  extend();
  return { title: "Steps", content: [element("div", { class: "side" }, curve("Reward by step", rewardsOf, true), curve("Gradient norm by step", (step) => [[nameOf(step), step.grad_norm]], false)), holder, more] };
}

const HEADINGS = ["step", "reward", "loss", "gradient norm", "episodes", "tokens", "took", "at, UTC"];
const NUMERIC = new Set(["reward", "loss", "gradient norm", "episodes", "tokens", "took"]);

function stepRow(step) {
  const to = address(["step", step.policy, String(step.lineage), String(step.step)]);
  const name = [element("a", { href: to, class: "id" }, `${step.policy}@${step.lineage}.${step.step}`), step.survives ? null : chip("rolled back", "warn"), step.no_gradient ? chip(step.no_gradient, "warn") : null];
  return { to, cells: [name, rewardBars(step, 1), fixed(step.loss, 4), fixed(step.grad_norm, 4), number(step.units), number(step.tokens), seconds(step.seconds), clock(step.stepped_at)] };
}

export async function stepView(page, { parts: [policy, lineage, step] }) {
  const view = await page.ask("step", { policy, lineage, step });
  const { line } = view;
  const largest = most(view.fed.map((unit) => Math.abs(unit.advantage)));
  const known = new Map((await page.ask("metrics")).map((metric) => [metric.name, metric]));
  return {
    title: `${policy}@${lineage}.${step}`,
    content: [
      element("div", { class: "head" }, element("h1", {}, "Step that made ", element("span", { class: "id" }, `${policy}@${lineage}.${step}`)), line.survives ? null : chip("rolled back", "warn"), line.no_gradient ? chip(line.no_gradient, "warn") : null),
      facts([["started from", view.started_from], ["reward", rewards(line)], ["loss", number(line.loss)], ["gradient norm", number(line.grad_norm)], ["episodes", line.units], ["samples", line.samples], ["tokens", number(line.tokens)], ["normalizer", number(view.normalizer)], ["took", seconds(line.seconds)], ["at, UTC", clock(line.stepped_at)], ["input digest", element("code", {}, view.input_digest)]], "facts wide"),
      problems(view.problems),
      element("h2", {}, "What it was fed"),
      table(["trajectory", "reward", "baseline", "advantage", "tokens", "mean ratio", "largest lag"], view.fed.map((unit) => fedRow(unit, largest)), new Set(["reward", "baseline", "advantage", "tokens", "mean ratio", "largest lag"])),
      element("h2", {}, "Metrics"),
      element("div", { class: "groups" }, metricGroups(view.metrics).map(([group, names]) => card(group, element("dl", { class: "measured" }, names.map((name) => measured(name, view.metrics[name], known.get(name))))))),
    ],
    up: address(["steps"]),
  };
}

/** Metrics by the word before their slash; those without one are together. */
function metricGroups(metrics) {
  const found = new Map();
  for (const name of Object.keys(metrics).sort()) {
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")).replaceAll("_", " ") : "step";
    found.set(group, [...(found.get(group) ?? []), name]);
  }
  return [...found];
}

function measured(name, value, known) {
  return element("div", {}, element("dt", {}, element("span", { class: "id" }, name.slice(name.indexOf("/") + 1)), element("span", { class: "quiet" }, known?.meaning ?? "")), element("dd", {}, number(value), known?.unit && known.unit !== "1" ? element("span", { class: "quiet" }, ` ${known.unit}`) : null));
}

function fedRow(unit, largest) {
  const to = episodeAddress(unit.episode, unit.attempt, "tokens", { seat: unit.seat, index: unit.agent });
  const name = [element("a", { href: to, class: "id" }, unit.episode), element("span", { class: "quiet" }, ` ${unit.seat}[${unit.agent}]`)];
  return { to, cells: [name, fixed(unit.reward, 3), fixed(unit.baseline, 3), signedBar(unit.advantage, largest, 3), number(unit.tokens), fixed(unit.mean_ratio, 4), number(unit.largest_lag)] };
}

/** A table whose rows may lead somewhere; the first cell of each names it, and `right` are the columns of numbers. */
export function table(headings, rows, right = new Set()) {
  const side = (name) => (right.has(name) ? "right" : "");
  const head = element("tr", {}, headings.map((name) => element("th", { scope: "col", class: side(name) }, name)));
  const body = rows.map(({ to = null, cells: [name, ...cells] }) =>
    element("tr", to === null ? {} : { "data-item": true, tabindex: "-1", "data-to": to }, element("th", { scope: "row", "data-label": headings[0] }, name), cells.map((cell, place) => element("td", { "data-label": headings[place + 1], class: side(headings[place + 1]) }, cell))),
  );
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, body)));
}

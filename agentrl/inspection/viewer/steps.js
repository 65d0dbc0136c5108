// Optimizer steps: how they went, and what one was fed and did.

import { chip, element, facts, problems } from "./dom.js";
import { clock, number, seconds } from "./text.js";
import { signed, signedBar } from "./colours.js";
import { address, episodeAddress } from "./routes.js";
import { card, chart, least, legend, most } from "./charts.js";

export async function stepsView(page) {
  const steps = await page.ask("steps");
  const policies = [...new Set(steps.map((step) => step.policy))];
  const [first, last] = [least, most].map((of) => of(steps.map((step) => step.step)));
  const curve = (field, title, options) =>
    card(
      title,
      legend(policies.map((policy, place) => [policy, `hue${place}`, ""])),
      chart(title, policies.map((policy, place) => ({ hue: `hue${place}`, points: steps.filter((step) => step.policy === policy && step.survives).map((step) => [step.step, step[field]]) })), { ...options, height: 110, ends: [`step ${first}`, `step ${last}`] }),
    );
  return {
    title: "Steps",
    content: steps.length
      ? [
          element("div", { class: "side" }, curve("reward", "Reward by step", {}), curve("grad_norm", "Gradient norm by step", { low: 0 })),
          table(["step", "reward", "loss", "gradient norm", "units", "tokens", "took", "at, UTC"], steps.map(stepRow)),
        ]
      : element("p", { class: "quiet" }, "No step has been taken yet."),
  };
}

function stepRow(step) {
  const to = address(["step", step.policy, String(step.lineage), String(step.step)]);
  const name = [element("a", { href: to, class: "id" }, `${step.policy}@${step.lineage}.${step.step}`), step.survives ? null : chip("rolled back", "warn")];
  return { to, cells: [name, signedBar(step.reward), number(step.loss), number(step.grad_norm), number(step.units), number(step.tokens), seconds(step.seconds), clock(step.stepped_at)] };
}

export async function stepView(page, { parts: [policy, lineage, step] }) {
  const view = await page.ask("step", { policy, lineage, step });
  const { line } = view;
  const largest = most(view.fed.map((unit) => Math.abs(unit.advantage)));
  const metrics = Object.entries(view.metrics).map(([name, value]) => [name, number(value)]);
  return {
    title: `${policy}@${lineage}.${step}`,
    content: [
      element("div", { class: "head" }, element("h1", {}, "Step that made ", element("span", { class: "id" }, `${policy}@${lineage}.${step}`)), line.survives ? null : chip("rolled back", "warn")),
      facts([["started from", view.started_from], ["reward", signed(line.reward)], ["loss", number(line.loss)], ["gradient norm", number(line.grad_norm)], ["units", line.units], ["samples", line.samples], ["tokens", number(line.tokens)], ["normaliser", number(view.normaliser)], ["took", seconds(line.seconds)], ["at, UTC", clock(line.stepped_at)], ...metrics, ["input digest", element("code", {}, view.input_digest)]], "facts wide"),
      problems(view.problems),
      element("h2", {}, "What it was fed"),
      table(["trajectory", "reward", "baseline", "advantage", "tokens", "mean ratio", "largest lag"], view.fed.map((unit) => fedRow(unit, largest))),
    ],
    up: address(["steps"]),
  };
}

function fedRow(unit, largest) {
  const to = episodeAddress(unit.episode, unit.attempt, "tokens", { seat: unit.seat, index: unit.agent });
  const name = [element("a", { href: to, class: "id" }, unit.episode), element("span", { class: "quiet" }, ` ${unit.seat}[${unit.agent}]`)];
  return { to, cells: [name, number(unit.reward), number(unit.baseline), signedBar(unit.advantage, largest), number(unit.tokens), number(unit.mean_ratio, 5), number(unit.largest_lag)] };
}

/** A table whose rows may lead somewhere; the first cell of each names it. */
export function table(headings, rows) {
  const head = element("tr", {}, headings.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map(({ to = null, cells: [name, ...cells] }) =>
    element("tr", to === null ? {} : { "data-item": true, tabindex: "-1", "data-to": to }, element("th", { scope: "row", "data-label": headings[0] }, name), cells.map((cell, place) => element("td", { "data-label": headings[place + 1] }, cell))),
  );
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, body)));
}

// Evaluations: what each version got on held-out tasks, as a whole and by split, with 95 % intervals.

import { element } from "./dom.js";
import { number } from "./text.js";
import { card, chart, least, legend, most } from "./charts.js";
import { table } from "./steps.js";

const SPLIT = "split_reward/";
const PASS = "pass_at/";
const HUES = 8;

export async function evaluationsView(page) {
  const lines = await page.ask("evaluations");
  if (!lines.length) return { title: "Evaluations", content: element("p", { class: "quiet" }, "No version has been evaluated yet.") };
  return { title: "Evaluations", content: [...new Set(lines.map((line) => line.policy))].map((policy) => report(policy, lines.filter((line) => line.policy === policy))) };
}

function report(policy, lines) {
  const names = [...new Set(lines.flatMap((line) => Object.keys(line.metrics)))].sort();
  const splits = names.filter((name) => name.startsWith(SPLIT)).map((name) => name.slice(SPLIT.length));
  const passes = names.filter((name) => name.startsWith(PASS)).map((name) => name.slice(PASS.length)).sort((a, b) => a - b);
  const rewards = ["reward", ...splits.map((split) => SPLIT + split)];
  const curves = rewards.map((name, place) => ({ hue: `hue${place % HUES}`, points: lines.map((line) => [line.step, line.metrics[name] ?? null]) }));
  const [first, last] = [least, most].map((of) => of(lines.map((line) => line.step)));
  const cells = (line) => [
    `step ${line.step}`,
    estimate(line.metrics, "reward", "reward_error"),
    ...splits.map((split) => estimate(line.metrics, SPLIT + split, `split_reward_error/${split}`)),
    ...passes.map((k) => estimate(line.metrics, PASS + k, `pass_at_error/${k}`)),
    number(line.metrics.tasks ?? line.metrics.episodes),
    number(line.metrics.dropped),
    number(line.metrics.turns),
    number(line.metrics.tokens),
  ];
  return card(
    `Held-out reward of ${policy}`,
    legend(["all tasks", ...splits].map((name, place) => [name, `hue${place % HUES}`, ""])),
    chart(`Held-out reward of ${policy} by step`, curves, { height: 110, ends: [`step ${first}`, `step ${last}`] }),
    table(["version", "reward", ...splits, ...passes.map((k) => `pass@${k}`), "tasks", "dropped", "turns", "tokens"], lines.map((line) => ({ cells: cells(line) }))),
    element("p", { class: "quiet" }, "After ±: half the width of the 95 % interval over tasks."),
  );
}

function estimate(metrics, name, error) {
  const value = metrics[name] ?? null;
  return value === null ? "" : `${number(value)} ± ${number(metrics[error] ?? 0)}`;
}

// Evaluations: what each version got on held-out tasks, as a whole and by split, with 95 % intervals.

import { element } from "./dom.js";
import { fixed, number } from "./text.js";
import { card, chart } from "./charts.js";
import { isShare } from "./series.js";
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
  const curves = rewards.map((name, place) => ({ hue: `hue${place % HUES}`, name: place ? splits[place - 1] : "all tasks", isSparse: true, points: lines.flatMap((line, at) => [...(isBreak(lines, at) ? [[line.step, null, 0]] : []), [line.step, line.metrics[name] ?? null, line.metrics[place ? `split_reward_error/${splits[place - 1]}` : "reward_error"] ?? 0]]) }));
  const breaks = lines.filter((_, at) => isBreak(lines, at)).map((line) => line.step);
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
  const columns = ["reward", ...splits, ...passes.map((k) => `pass@${k}`), "tasks", "dropped", "turns", "tokens"];
  return card(
    `Held-out reward of ${policy}`,
    chart(`Held-out reward of ${policy} by step`, curves, { height: 150, share: isShare("reward", curves.flatMap((each) => each.points)) }),
    table(["version", ...columns], [...lines].reverse().map((line) => ({ cells: cells(line) })), new Set(columns)),
    breaks.length ? element("p", { class: "quiet" }, `The held-out tasks changed before step ${breaks.join(", ")}: rewards before and after a gap are of different tasks.`) : null,
    element("p", { class: "quiet" }, `After ±, and as error bars: half the width of the 95 % interval over tasks. An evaluation soon after another is drawn beside the line.`),
  );
}

/** Whether an evaluation was on other tasks than the one before. */
function isBreak(lines, at) {
  const [before, now] = [lines[at - 1]?.metrics.task_digest, lines[at].metrics.task_digest];
  return (before ?? now) !== now && now !== undefined;
}

function estimate(metrics, name, error) {
  const value = metrics[name] ?? null;
  return value === null ? "" : `${fixed(value, 3)} ± ${fixed(metrics[error] ?? 0, 3)}`;
}

// The first page of a run: how it goes, what it waits for, what is wrong, and any metric.

import { element, facts, problems } from "./dom.js";
import { fixed, number, plural, seconds } from "./text.js";
import { address } from "./routes.js";
import { card } from "./charts.js";
import { AXES, axisChoice, metricCard, metricSearch, metricTitle } from "./series.js";
import { tile } from "./timeline.js";

const CHARTS = [
  [["reward/mean"]],
  [["evaluation/reward"], "error bars: 95 % interval over tasks"],
  [["episodes/tokens"], "sampled tokens per episode"],
  [["entropy"], "nats per token"],
  [["k3"], "nats per token, between the weights that sampled and those that train"],
  [["tokens/sampled_per_s"], "sampled tokens per second"],
  [["engine/busy_share", "trainer/busy_share"], "share of a step’s time; the rest is waiting", "Busy"],
];

const FAILED = "reward <= 0";
const PURPOSES = { train: "training", evaluate: "held-out" };

export async function overviewView(page, { parameters }) {
  const [run, { rewards }] = await Promise.all([page.ask("overview"), page.ask("run")]);
  const isEvaluation = run.purpose === "evaluate";
  const chosen = [parameters.metrics ?? []].flat().flatMap((text) => text.split("\n")).filter(Boolean);
  const axes = AXES.filter((axis) => axis === "step" || Object.keys(run.places[axis] ?? {}).length);
  const axis = axes.includes(parameters.by) ? parameters.by : "step";
  const go = (change) => page.go(address(["overview"], { by: axis === "step" ? "" : axis, metrics: chosen.join("\n"), ...change }));
  const own = await Promise.all(chosen.map(async (name) => [name, await page.ask("series", { metric: name })]));
  const shown = { policies: run.policies, axis, places: run.places };
  const of = (name) => run.metrics.find((metric) => metric.name === name);
  const remove = (name) => element("button", { type: "button", class: "remove", "aria-label": `remove ${name}`, on: { click: () => go({ metrics: chosen.filter((each) => each !== name).join("\n") }) } }, "✕");
  const standard = isEvaluation ? [] : CHARTS.filter(([names]) => names.some((name) => run.series[name]));
  return {
    title: "Overview",
    content: [
      isEvaluation ? await evaluationTiles(page, run) : tiles(run),
      isEvaluation && rewards.includes("reward") ? element("p", {}, element("a", { href: address(["episodes"], { where: FAILED }) }, "Failed episodes"), element("span", { class: "quiet" }, `, with ${FAILED}`)) : null,
      problems(run.problem ? [run.problem] : []),
      alarms(run.alarms),
      waits(run),
      run.metrics.length
        ? element("div", { class: "tools" }, metricSearch(run.metrics, (name) => go({ metrics: [...new Set([...chosen, name])].join("\n") })), axes.length < 2 ? null : axisChoice(axis, axes, (by) => go({ by: by === "step" ? "" : by })))
        : element("p", { class: "quiet" }, run.state === "running" ? "No step has been taken yet: the first metrics appear here with it." : "This run recorded no metrics."),
      element(
        "div",
        { class: "side" },
        own.map(([name, series]) => element("div", { class: "chosen" }, remove(name), metricCard(metricTitle(name), [{ name, series }], { ...shown, about: [of(name)?.meaning || "a metric of the environment", of(name)?.unit].filter(Boolean).join(" · ") }))),
        standard.map(([names, about, title]) => metricCard(title ?? metricTitle(names[0]), names.filter((name) => run.series[name]).map((name) => ({ name: name.replace("/busy_share", ""), series: run.series[name] })), { ...shown, about })),
      ),
    ],
  };
}

/** The results of an evaluation, which has one point of each metric. */
async function evaluationTiles(page, run) {
  const several = run.policies.length > 1;
  const results = (await page.ask("evaluations")).flatMap(({ policy, metrics }) => {
    const whose = several ? ` of ${policy}` : "";
    const estimate = (label, name, error) => tile(`${label}${whose}`, `${fixed(metrics[name], 3)} ± ${fixed(metrics[error] ?? 0, 3)}`);
    const passes = Object.keys(metrics).filter((name) => name.startsWith("pass_at/"));
    return [estimate("reward", "reward", "reward_error"), passes.map((name) => estimate(`pass@${name.slice(8)}`, name, name.replace("/", "_error/")))];
  });
  return element("div", { class: "tiles" }, results, runTiles(run));
}

function runTiles(run) {
  const episodes = Object.entries(run.episodes).map(([purpose, count]) => tile(`${PURPOSES[purpose] ?? purpose} episodes`, number(count)));
  return [tile("state", run.state || "no process"), run.seconds === null ? null : tile("lasted", seconds(run.seconds)), run.resumed ? tile("resumed from a checkpoint", plural(run.resumed, "time")) : null, episodes];
}

function tiles(run) {
  const last = (name, policy) => run.series[name]?.policies[policy]?.at(-1) ?? null;
  const each = run.policies.flatMap((policy) => {
    const whose = run.policies.length > 1 ? ` of ${policy}` : "";
    const [step, held] = [last("reward/mean", policy), last("evaluation/reward", policy)];
    return [step ? tile(`reward${whose} at step ${step[0]}`, number(step[1])) : null, held ? tile(`held-out reward${whose} at step ${held[0]}`, `${number(held[1])}${held[2] ? ` ± ${number(held[2], 2)}` : ""}`) : null];
  });
  return element("div", { class: "tiles" }, runTiles(run), each);
}

function alarms(found) {
  if (!found.length) return null;
  return element("section", { class: "alarms", "aria-label": "Alarms" }, element("h2", {}, plural(found.length, "alarm")), found.map((alarm) => element("article", { class: "alarm" }, element("b", {}, alarm.name), " ", alarm.policy ? `${alarm.policy}: ` : "", alarm.text, element("p", { class: "advice" }, "Try: ", alarm.advice))));
}

function waits(run) {
  const rows = [["bottleneck", run.bottleneck], ["first step", run.pace], ...run.waits.map((wait) => ["waits", wait]), ...run.controls.slice(-8).map((action) => ["control", action])].filter(([, text]) => text);
  return rows.length ? card(run.state === "running" ? "What it waits for" : "What it waited for", facts(rows, "facts nodes")) : null;
}

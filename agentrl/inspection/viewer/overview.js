// The first page of a run: how it goes, what it waits for, what is wrong, and any metric.

import { element, facts, problems } from "./dom.js";
import { fixed, number, plural, seconds, told } from "./text.js";
import { address } from "./routes.js";
import { card } from "./charts.js";
import { AXES, axisChoice, metricCard, metricSearch, metricTitle } from "./series.js";

const CHARTS = [
  [["episodes/tokens"], "sampled tokens per episode"],
  [["entropy"], "nats per token"],
  [["k3"], "nats per token, between the weights that sampled and those that train"],
  [["tokens/sampled_per_s"], "sampled tokens per second"],
  [["engine/busy_share", "trainer/busy_share"], "share of a step’s time; the rest is waiting", "Busy"],
];

const FAILED = "reward <= 0";
const PURPOSES = { train: "training", evaluate: "held-out" };

export async function overviewView(page, { parameters }) {
  const [answer, { rewards }] = await Promise.all([page.ask("overview"), page.ask("run")]);
  const run = { ...answer, series: { ...answer.series } };
  const isEvaluation = run.purpose === "evaluate";
  const chosen = [parameters.metrics ?? []].flat().flatMap((text) => text.split("\n")).filter(Boolean);
  const axes = AXES.filter((axis) => axis === "step" || Object.keys(run.places[axis] ?? {}).length);
  const axis = axes.includes(parameters.by) ? parameters.by : "step";
  const go = (change) => page.go(address(["overview"], { by: axis === "step" ? "" : axis, metrics: chosen.join("\n"), ...change }));
  const own = await Promise.all(chosen.map(async (name) => [name, await page.ask("series", { metric: name })]));
  const shown = { policies: run.policies, axis, places: run.places };
  const of = (name) => run.metrics.find((metric) => metric.name === name);
  const remove = (name) => element("button", { type: "button", class: "remove", "aria-label": `remove ${name}`, on: { click: () => go({ metrics: chosen.filter((each) => each !== name).join("\n") }) } }, "✕");
  const charts = isEvaluation ? [] : [...rewardCharts(run), ...ownCharts(run, chosen), ...CHARTS].filter(([names]) => names.some((name) => run.series[name]));
  return {
    title: "Overview",
    content: [
      isEvaluation ? await evaluationTiles(page, run) : tiles(run),
      isEvaluation && rewards.includes("reward") ? element("p", {}, element("a", { href: address(["episodes"], { where: FAILED }) }, "Failed episodes"), element("span", { class: "quiet" }, `, with ${FAILED}`)) : null,
      run.failure ? element("p", { class: "problem", role: "alert" }, element("b", {}, "Failed. "), run.failure) : null,
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
        charts.map(([names, about, title]) => metricCard(title ?? metricTitle(names[0]), names.filter((name) => run.series[name]).map((name) => ({ name: seriesName(run, name), series: run.series[name] })), { ...shown, about })),
      ),
      settings(run),
    ],
  };
}

const REWARD = "reward/mean";
const HELD_OUT = "evaluation/reward";

/** The charts of rewards: of each seat, instead of their sum, for a policy with several seats. */
function rewardCharts(run) {
  const seats = (prefix) => Object.keys(run.series).filter((name) => name.startsWith(prefix) && name !== REWARD);
  return [
    [alone(run, REWARD, seats("reward/")), null, metricTitle(REWARD)],
    [alone(run, HELD_OUT, seats(`${HELD_OUT}/`)), "error bars: 95 % interval over tasks", metricTitle(HELD_OUT)],
  ];
}

/** The metrics to draw: `name`, without policies that have one of each seat, and these. */
function alone(run, name, bySeat) {
  const several = new Set(bySeat.flatMap((each) => Object.keys(run.series[each].policies)));
  const policies = Object.entries(run.series[name]?.policies ?? {}).filter(([policy]) => !several.has(policy));
  if (run.series[name]) run.series[name] = { ...run.series[name], policies: Object.fromEntries(policies) };
  return policies.length ? [name, ...bySeat] : bySeat;
}

/** The environment’s own metrics that were not chosen, each with its values over held-out tasks. */
function ownCharts(run, chosen) {
  return run.own_metrics.filter((name) => !chosen.includes(name)).map((name) => [[name, `evaluation/metric/${name}`], "a metric of the environment", name]);
}

function seriesName(run, name) {
  if (name.startsWith("evaluation/metric/")) return "held-out";
  if (name === REWARD) return name;
  if (run.own_metrics.includes(name) && run.series[`evaluation/metric/${name}`]) return "training";
  return name.replace("/busy_share", "").replace("evaluation/reward/", "").replace(/^reward\//, "");
}

function settings(run) {
  const rows = Object.entries(run.settings).map(([name, value]) => [name, typeof value === "string" ? value : told(value)]);
  return rows.length ? card("Settings that differ from the defaults", facts(rows, "facts wide")) : null;
}

/** The results of an evaluation, which has one point of each metric. */
async function evaluationTiles(page, run) {
  const several = run.policies.length > 1;
  const results = (await page.ask("evaluations")).flatMap(({ policy, metrics }) => {
    const whose = several ? ` of ${policy}` : "";
    const estimate = (label, name, error) => tile(`${label}${whose}`, `${fixed(metrics[name], 3)} ± ${fixed(metrics[error] ?? 0, 3)}`);
    const passes = Object.keys(metrics).filter((name) => name.startsWith("pass_at/"));
    const seats = Object.keys(metrics).filter((name) => name.startsWith("reward/"));
    const rewards = seats.length ? seats.map((name) => tile(`reward of ${name.slice("reward/".length)}`, fixed(metrics[name], 3))) : estimate("reward", "reward", "reward_error");
    return [rewards, passes.map((name) => estimate(`pass@${name.slice(8)}`, name, name.replace("/", "_error/")))];
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
    const names = (prefix) => Object.keys(run.series).filter((name) => name.startsWith(prefix) && name !== prefix + "mean");
    const of = (text, single, prefix) => {
      const seats = names(prefix).filter((name) => last(name, policy));
      return (seats.length ? seats : [single]).map((name) => {
        const point = last(name, policy);
        const which = name === single ? whose : ` of ${name.slice(prefix.length)}`;
        return point ? tile(`${text}${which} at step ${point[0]}`, `${number(point[1])}${point[2] ? ` ± ${number(point[2], 2)}` : ""}`) : null;
      });
    };
    return [of("reward", REWARD, "reward/"), of("held-out reward", HELD_OUT, `${HELD_OUT}/`)];
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

function tile(name, value) {
  return element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name));
}

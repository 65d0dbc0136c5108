// Metrics as charts: which series a metric has, on which axis they lie, how one is chosen.

import { element } from "./dom.js";
import { card, chart } from "./charts.js";

export const AXES = ["step", "tokens", "seconds"];
const HUES = 8;

const TITLES = { "reward/mean": "Reward of training", "evaluation/reward": "Held-out reward", "episodes/tokens": "Response length", entropy: "Entropy", k3: "Off-policy distance k3", "tokens/sampled_per_s": "Throughput" };

/** The title of a metric's chart on every page: its name, unless it has a better known one. */
export function metricTitle(name) {
  return TITLES[name] ?? name;
}

/** Whether 1 is the maximum of a metric: a share, or a reward that never left 0 to 1. */
export function isShare(unit, points) {
  const isReward = unit === "reward" && points.every(([, y, error]) => y === null || (y >= 0 && y <= 1 && error <= 1));
  return (unit === "fraction" || isReward) && points.every(([, y]) => y === null || (y >= 0 && y <= 1.0001));
}

/** Points [place, value, error] of a policy's [step, value, error], on an axis. */
export function placed(points, axis, policy, places) {
  if (axis === "step") return points;
  const known = new Map(places[axis]?.[policy] ?? []);
  return points.filter(([step]) => known.has(step)).map(([step, ...others]) => [known.get(step), ...others]);
}

/** A card with the chart of one or more metrics; a hue is a policy, and an estimate has its interval. */
export function metricCard(title, parts, { policies, axis, places, about = null }) {
  const several = parts.length > 1;
  const series = parts.flatMap(({ name, series: found }, part) =>
    Object.entries(found.policies).map(([policy, points]) => ({
      name: [policies.length > 1 ? policy : null, several || policies.length === 1 ? name : null].filter(Boolean).join(": "),
      hue: `hue${(several ? part * policies.length + policies.indexOf(policy) : Math.max(policies.indexOf(policy), 0)) % HUES}`,
      isSparse: found.is_estimate,
      points: placed(points, axis, policy, places),
    })),
  );
  const { unit } = parts[0].series;
  const share = isShare(unit, series.flatMap((each) => each.points));
  return card(title, about ? element("p", { class: "quiet about" }, about) : null, chart(title, series, { axis, share, percent: unit === "fraction" }));
}

/** Buttons for the axes. */
export function axisChoice(axis, axes, choose) {
  return element("div", { class: "segments", role: "group", "aria-label": "Axis of the charts" }, axes.map((each) => element("button", { type: "button", "aria-pressed": String(each === axis), on: { click: () => choose(each) } }, `by ${each}`)));
}

/** A field that finds any metric by a part of its name or its meaning. */
export function metricSearch(metrics, choose) {
  const list = element("ul", { class: "found", role: "listbox", "aria-label": "Metrics" });
  const show = (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = words.length ? metrics.filter((metric) => words.every((word) => `${metric.name} ${metric.meaning ?? ""}`.toLowerCase().includes(word))) : [];
    const rank = ({ name }) => (name === text.trim() ? 0 : name.startsWith(text.trim()) ? 1 : 2);
    hits.sort((one, other) => rank(one) - rank(other));
    list.replaceChildren(...hits.slice(0, 12).map((metric) => element("li", {}, element("button", { type: "button", on: { click: () => choose(metric.name) } }, element("b", {}, metric.name), element("span", { class: "quiet" }, metric.meaning === "" ? "of the environment" : metric.meaning)))));
    if (words.length && !hits.length) list.append(element("li", { class: "quiet" }, "no metric has these words"));
  };
  const submit = (event) => {
    event.preventDefault();
    list.querySelector("button")?.click();
  };
  const field = element("input", { type: "search", id: "search", placeholder: `Show any of ${metrics.length} metrics   /`, autocomplete: "off", spellcheck: "false", on: { input: (event) => show(event.target.value) } });
  return element("form", { class: "metricsearch", role: "search", on: { submit } }, element("label", {}, element("span", { class: "unseen" }, "Metrics to show"), field), list);
}

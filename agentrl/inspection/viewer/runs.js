// All runs of a directory: a list with search and columns, and a comparison of those that are chosen.

import { element, problems, replace } from "./dom.js";
import { fixed, number, plural, told } from "./text.js";
import { address } from "./routes.js";
import { card, chart } from "./charts.js";
import { AXES, axisChoice, isShare, metricSearch, metricTitle } from "./series.js";

const HUES = 8;
const COLUMNS = {
  purpose: (run) => run.purpose,
  state: (run) => run.state,
  episodes: (run) => run.episodes,
  dropped: (run) => run.dropped,
  "in flight": (run) => run.in_flight,
  steps: (run) => Math.max(0, ...Object.values(run.steps)),
  policies: (run) => [...new Set([...Object.keys(run.steps), ...Object.keys(run.rewards).map((name) => name.split("/")[0])])].join(", "),
  reward: (run) => Object.values(run.rewards)[0] ?? null, // sorts by the first policy’s
};
const RIGHT = new Set(["episodes", "dropped", "in flight", "steps", "reward"]);

export async function runsView(page, { parameters }) {
  const runs = await page.ask("runs");
  const state = { find: "", sort: "run", ascending: "1", columns: "", ...parameters };
  const columns = (state.columns ? state.columns.split(",") : Object.keys(COLUMNS)).filter((name) => Object.hasOwn(COLUMNS, name));
  const go = (change) => page.go(address(["runs"], { ...state, ...change, run: "" }));
  const chosen = new Set();
  const compare = element("button", { type: "button", disabled: true, on: { click: () => page.go(address(["comparison"], { runs: [...chosen].join("\n"), run: "" })) } }, "Compare");
  const count = element("p", { class: "count", role: "status" });
  const body = element("tbody");
  const field = element("input", { type: "search", id: "search", value: state.find, placeholder: "Find runs by name, state or policy   /", autocomplete: "off", spellcheck: "false", on: { input: () => draw() } });
  const directory = (run) => run.path.split("/").pop();
  const choose = (name, isChosen) => {
    if (isChosen) chosen.add(name);
    else chosen.delete(name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size < 2 ? "Choose two runs to compare" : `Compare ${plural(chosen.size, "run")}`;
  };
  function draw() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.name, directory(run), run.problem ?? "", ...Object.values(COLUMNS).map((of) => of(run))].join(" ").toLowerCase();
    const found = runs.filter((run) => words.every((word) => text(run).includes(word)));
    const of = COLUMNS[state.sort] ?? ((run) => run.name);
    found.sort((a, b) => (state.ascending ? 1 : -1) * compared(of(a), of(b)));
    replace(body, found.map((run) => row(run, directory(run), columns, chosen, choose)));
    replace(count, found.length === runs.length ? plural(runs.length, "run") : `${number(found.length)} of ${plural(runs.length, "run")}`);
  }
  draw();
  choose("", false);
  const heading = (name) => {
    const order = state.sort === name ? (state.ascending ? "ascending" : "descending") : null;
    return element("th", { scope: "col", class: RIGHT.has(name) ? "right" : "", "aria-sort": order }, element("button", { type: "button", on: { click: () => go({ sort: name, ascending: order === "ascending" ? "" : "1", find: field.value }) } }, name, order ? element("span", { "aria-hidden": "true" }, order === "ascending" ? " ↑" : " ↓") : null));
  };
  const boxes = Object.keys(COLUMNS).map((name) => element("label", {}, element("input", { type: "checkbox", name, checked: columns.includes(name) }), name));
  const change = (event) => go({ find: field.value, columns: [...event.currentTarget.querySelectorAll("input:checked")].map((box) => box.name).join(",") });
  return {
    title: "Runs",
    content: [
      element("form", { class: "query", role: "search", on: { submit: (event) => event.preventDefault() } }, element("label", { class: "wide" }, element("span", { class: "unseen" }, "Runs to find"), field), compare),
      element("div", { class: "listhead" }, count, element("details", { class: "choice" }, element("summary", {}, "Columns"), element("fieldset", { on: { change } }, element("legend", { class: "unseen" }, "Columns"), boxes))),
      element("div", { class: "scroll" }, element("table", { class: "runs" }, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, element("span", { class: "unseen" }, "compare")), ["run", ...columns].map(heading))), body)),
      element("p", { class: "quiet" }, "Reward: mean of the last 5 steps of a training run, or of all episodes of an evaluation. Episodes: committed ones, without a training run’s held-out episodes."),
    ],
  };
}

function row(run, name, columns, chosen, choose) {
  const to = address(["overview"], { run: name });
  const box = element("input", { type: "checkbox", "aria-label": `compare ${name}`, checked: chosen.has(name), on: { change: (event) => choose(name, event.target.checked) } });
  const cells = columns.map((column) => {
    const value = COLUMNS[column](run);
    return element("td", { "data-label": column, class: `${RIGHT.has(column) ? "right" : ""} ${value === null ? "unknown" : ""}` }, column === "reward" ? rewards(run) : number(value));
  });
  return element("tr", { "data-item": true, tabindex: "-1", "data-to": to }, element("td", { class: "pick" }, element("label", {}, box, element("span", { class: "onphone" }, "compare"))), element("th", { scope: "row", "data-label": "run" }, element("a", { href: to, class: "id" }, name), problems(run.problem ? [run.problem] : [])), cells);
}

/** The reward of a run’s policy, or of each of its policies and their seats. */
function rewards(run) {
  const found = Object.entries(run.rewards);
  const isOne = new Set(found.map(([name]) => name.split("/")[0])).size < 2;
  const named = found.map(([name, reward]) => [isOne ? name.split("/").slice(1).join("/") : name, fixed(reward, 3)]);
  return found.length ? named.map((words) => words.filter(Boolean).join(" ")).join(" · ") : fixed(undefined, 3);
}

function compared(a, b) {
  return (a === null) - (b === null) || (a < b ? -1 : a > b ? 1 : 0);
}

/** Several runs: what differs, paired held-out rewards, curves on one axis, metrics side by side. */
export async function comparisonView(page, { parameters }) {
  const names = (parameters.runs ?? "").split("\n").filter(Boolean);
  if (!names.length) return { title: "Comparison", content: [element("p", { class: "quiet" }, "Choose two runs of the ", element("a", { href: "#/runs" }, "list"), ".")] };
  const own = (parameters.metrics ?? "").split("\n").filter(Boolean);
  const axis = AXES.includes(parameters.by) ? parameters.by : "step";
  const found = await page.ask("comparison", { runs: names.join("\n"), by: axis, metrics: own.join("\n") });
  const go = (change) => page.go(address(["comparison"], { runs: names.join("\n"), by: axis, metrics: own.join("\n"), ...change, run: "" }));
  const groups = found.groups.map((group) => group.name);
  const catalog = [...new Set(found.metrics.map((line) => line.metric))].map((name) => ({ name, meaning: null }));
  const policies = new Set(found.metrics.map((line) => line.policy));
  const metrics = [...new Set([...own, ...found.curves.map((curve) => curve.metric)])];
  return {
    title: `Comparison of ${groups.join(", ")}`,
    content: [
      element("h1", {}, groups.join("  ·  ")),
      found.groups.filter((group) => group.runs.length > 1).map((group) => element("p", { class: "quiet" }, `${group.name}: ${group.runs.join(", ")}; one curve, with half the range of the seeds as its band`)),
      card("Held-out reward, paired over the same tasks", paired(found, groups)),
      card("Settings that differ", found.settings.length ? wide(["setting", ...groups], found.settings.map((line) => [line.name, ...line.values.map((value) => (value === null ? "–" : told(value)))])) : element("p", { class: "quiet" }, "none")),
      element("div", { class: "tools" }, metricSearch(catalog, (name) => go({ metrics: [...new Set([...own, name])].join("\n") })), axisChoice(axis, AXES, (by) => go({ by }))),
      element("div", { class: "side" }, metrics.map((metric) => curvesCard(metric, found, groups))),
      element("details", { class: "card" }, element("summary", {}, `All ${number(found.metrics.length)} metrics side by side`), element("p", { class: "quiet" }, "mean of the last 5 steps; newest evaluation, clock or total"), wide(["metric", ...groups], found.metrics.map((line) => [policies.size > 1 ? `${line.policy}: ${line.metric}` : line.metric, ...line.values.map((value) => number(value))]), 1, "aligned")),
    ],
    up: "#/runs",
  };
}

function signed(value) {
  return `${value > 0 ? "+" : ""}${fixed(value, 3)}`;
}

function paired(found, groups) {
  const rows = found.paired.map((line) => [line.group, line.policy, fixed(line.baseline, 3), fixed(line.reward, 3), `${signed(line.difference)} [${signed(line.low)}, ${signed(line.high)}]`, line.verdict, `${line.better} / ${line.worse} of ${line.tasks}`]);
  return [
    rows.length ? wide(["run", "policy", groups[0], "reward", "difference", "verdict", "tasks better / worse"], rows, 2) : null,
    found.notes.map((note) => element("p", { class: "quiet" }, note)),
  ];
}

function curvesCard(metric, found, groups) {
  const curves = found.curves.filter((curve) => curve.metric === metric);
  const policies = [...new Set(curves.map((curve) => curve.policy))].sort();
  const isBand = (name) => found.groups.find((group) => group.name === name).runs.length > 1;
  const series = curves.map((curve) => ({
    name: policies.length > 1 ? `${curve.group}: ${curve.policy}` : curve.group,
    hue: `hue${(groups.indexOf(curve.group) * policies.length + policies.indexOf(curve.policy)) % HUES}`,
    kind: isBand(curve.group) ? "band" : "line",
    isSparse: metric.startsWith("evaluation/"),
    points: curve.points.map((point) => [point.x, point.y, point.error]),
  }));
  const share = isShare(/reward/.test(metric) ? "reward" : "", series.flatMap((each) => each.points));
  return card(metricTitle(metric), chart(metricTitle(metric), series, { axis: found.axis, share, height: 150 }));
}

function wide(headings, rows, right = headings.length, className = null) {
  return element("div", { class: "scroll" }, element("table", { class: className }, element("thead", {}, element("tr", {}, headings.map((name, place) => element("th", { scope: "col", class: place >= right ? "right" : "" }, name)))), element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell, place) => element(place ? "td" : "th", { scope: place ? null : "row", "data-label": headings[place], class: place >= right ? "right" : "" }, cell)))))));
}

// The list of episodes: filter, sort, columns, search; a dot for each reward above it.

import { chip, element, facts, isFailed, problems, replace, status, statusLabel } from "./dom.js";
import { clock, number, plural, safeText, seconds, shortName } from "./text.js";
import { rewardBars, rewardsOf, signedBar } from "./colors.js";
import { address, episodeAddress } from "./routes.js";
import { chart, most } from "./charts.js";
import { cell } from "./where.js";

const PAGE = 100;
const USUAL = ["episode", "status", "environment", "reward", "ended", "turns", "tokens", "staleness", "seconds"];
const CELLS = {
  status: (line) => status(line.status, line),
  environment: (line) => element("span", { title: line.environment }, shortName(line.environment)),
  reward: (line, largest, columns) => (columns.some(isOfSeat) ? signedBar(line.reward, largest, 3) : rewardBars(line, largest)),
  ended: (line) => element("span", { class: line.drop_reason && !line.stop_reason ? "bad" : line.stop_reason === "completed" ? "quiet" : "", title: line.detail || null }, line.stop_reason ?? line.drop_reason ?? "–"),
  seconds: (line) => seconds(line.seconds),
  seats: (line) => Object.entries(line.seats).map(([seat, policy]) => chip(seat === policy ? seat : `${seat}: ${policy}`)),
  policies: (line) => line.policies.map((policy) => chip(policy)),
  admitted_at: (line) => clock(line.admitted_at),
  committed_at: (line) => clock(line.committed_at),
};
const SEAT_HUES = [3, 4, 1, 5, 6, 7]; // 0 and 2 are of episodes with one rewarded seat
const RIGHT = new Set(["attempt", "reward", "oldest_step", "lineage", "staleness", "turns", "tokens", "seconds"]);

/** The addresses of the episodes as they were last listed, for going from one to the next. */
export const listed = { addresses: [] };

export async function listView(page, { parameters }) {
  const [run, statuses] = await Promise.all([page.ask("run"), page.ask("statuses")]);
  const state = { where: "", match: "", sort: "admitted_at", ascending: "", columns: "", ...parameters };
  const columns = state.columns ? state.columns.split(",") : USUAL.flatMap((name) => (name === "reward" ? run.rewards : name));
  const go = (change) => page.go(address(["episodes"], { ...state, sort: state.sort === "admitted_at" ? "" : state.sort, ...change }));
  const question = { where: state.where, match: state.match, sort: parameters.sort ?? "", ascending: state.ascending, limit: PAGE };
  const body = element("tbody");
  const strip = element("div", { class: "strip" });
  const count = element("p", { class: "count", role: "status" });
  const more = element("button", { type: "button", class: "more", on: { click: () => extend() } });
  const shown = [];

  async function extend() {
    const { total, lines } = await page.ask("episodes", { ...question, offset: shown.length });
    shown.push(...lines);
    const largest = most(shown.flatMap((line) => rewardsOf(line).map(Math.abs)));
    replace(body, shown.map((line) => row(line, columns, largest)));
    const isPart = run.all > total && !state.where && !state.match;
    replace(count, plural(total, "episode"), isPart ? ` of the run’s ${number(run.all)} are in this file` : "", total > shown.length ? `, ${number(shown.length)} shown` : "");
    more.hidden = shown.length >= total;
    more.textContent = `Show ${number(Math.min(PAGE, total - shown.length))} more`;
    replace(strip, shown.length > 2 ? rewardDots(shown, total, state, columns) : null);
    listed.addresses = shown.map((line) => episodeAddress(line.episode, line.attempt));
  }

  let problem = null;
  try {
    await extend();
  } catch (error) {
    problem = error.message;
  }
  return {
    title: "Episodes",
    content: [
      machines(run),
      bar(run, statuses, state, go),
      problem ? element("p", { class: "problem", role: "alert" }, problem) : [
        element("div", { class: "listhead" }, count, columnChoice(run, columns, go)),
        strip,
        element("div", { class: "scroll" }, element("table", { class: "episodes" }, element("thead", {}, element("tr", {}, columns.map((name) => heading(name, state, go)))), body)),
        more,
      ],
    ],
  };
}

function bar(run, statuses, state, go) {
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const [match, where] = [form.get("match"), form.get("where")];
    if (isFilter(match, run.columns)) go({ match: "", where: where ? `(${where}) and (${match})` : match });
    else go({ match, where });
  };
  const links = Object.entries(statuses).map(([name, count]) => {
    const where = `status = ${name}`;
    const chosen = state.where === where;
    return element("a", { class: `filter ${chosen ? "chosen" : ""}`, href: address(["episodes"], { match: state.match, where: chosen ? "" : where }), "aria-current": chosen ? "true" : null }, statusLabel(name, name === "finished" ? { purpose: "evaluate" } : null), element("b", {}, number(count)));
  });
  return element(
    "form",
    { class: "query", role: "search", on: { submit } },
    element("label", {}, element("span", { class: "unseen" }, "Words to look for"), element("input", { type: "search", name: "match", id: "search", value: state.match, placeholder: "Words, or “a phrase”   /", autocomplete: "off", spellcheck: "false" })),
    element("label", { class: "wide" }, element("span", { class: "unseen" }, "Filter by columns"), element("input", { type: "search", name: "where", id: "where", value: state.where, placeholder: `${run.rewards[0]} < 0 and turns > 4`, autocomplete: "off", spellcheck: "false" })),
    element("button", { type: "submit" }, "Show"),
    element("nav", { class: "filters", "aria-label": "By status" }, links),
  );
}

/** Whether words to look for are a filter: they begin with a column and an operator, as in `reward = 0`. */
function isFilter(words, columns) {
  const [, column, table] = words.match(/^[\s(]*((\w+)[\w./-]*)\s*(?:[=<>~]|!=)/) ?? [];
  return column !== undefined && (Object.hasOwn(columns, column) || ["reward", "metric", "data"].includes(table));
}

/** Which node does what, and what the run waits for most; nothing of a run without processes of its own. */
function machines(run) {
  const said = (process) => `${process.name}${process.gpus.length ? ` on GPU ${process.gpus.join(", ")}` : ""} ${process.doing}`;
  const nodes = [...new Set(run.processes.map((process) => process.node))];
  const rows = nodes.map((node) => [node || "this machine", run.processes.filter((process) => process.node === node).map(said).join(" · ")]);
  return rows.length ? element("section", { "aria-label": "Nodes" }, facts([["bottleneck", run.bottleneck], ...rows], "facts nodes")) : [];
}

function columnChoice(run, columns, go) {
  const all = [...new Set([...columns, ...USUAL.filter((name) => name !== "reward"), ...Object.keys(run.columns)])];
  const boxes = all.map((name) => element("label", {}, element("input", { type: "checkbox", name, checked: columns.includes(name) }), name.replaceAll("_", " ")));
  const change = (event) => {
    const chosen = [...event.currentTarget.querySelectorAll("input:checked")].map((box) => box.name);
    go({ columns: chosen.length ? chosen.join(",") : "" });
  };
  return element("details", { class: "choice" }, element("summary", {}, "Columns"), element("fieldset", { on: { change } }, element("legend", { class: "unseen" }, "Columns"), boxes));
}

function heading(name, state, go) {
  const label = name.replaceAll("_", " ");
  const sorts = name === "ended" ? "stop_reason" : name;
  const sorted = state.sort === sorts;
  const click = () => go({ sort: sorts, ascending: sorted && !state.ascending ? "1" : "" });
  const order = sorted ? (state.ascending ? "ascending" : "descending") : null;
  return element("th", { scope: "col", class: isRight(name) ? "right" : "", "aria-sort": order }, element("button", { type: "button", on: { click } }, label, sorted ? element("span", { class: "arrow", "aria-hidden": "true" }, state.ascending ? " ↑" : " ↓") : null));
}

function isOfSeat(name) {
  return name.startsWith("reward/");
}

function isRight(name) {
  return RIGHT.has(name) || isOfSeat(name);
}

function row(line, columns, largest) {
  const to = episodeAddress(line.episode, line.attempt);
  const cells = columns.map((name) => {
    const isKnown = name === "ended" ? line.stop_reason ?? line.drop_reason : cell(line, name);
    const label = { "data-label": name.replaceAll("_", " "), class: `${isRight(name) ? "right" : ""} of-${name} ${isKnown === null ? "unknown" : ""}` };
    if (name === "episode") return element("th", { scope: "row", ...label }, element("a", { href: to, class: "id" }, line.episode), line.attempt ? element("span", { class: "quiet" }, ` attempt ${line.attempt}`) : null, problems(line.problem ? [line.problem] : []));
    if (isOfSeat(name)) return element("td", label, signedBar(cell(line, name), largest, 3));
    return element("td", label, CELLS[name] ? CELLS[name](line, largest, columns) : number(line[name]));
  });
  return element("tr", { "data-item": true, tabindex: "-1", "data-to": to, class: isFailed(line) ? "failed" : null }, cells);
}

/** Rewards in the order of the list: a dot for each episode, or for each seat; an episode that earned nothing looks failed. */
function rewardDots(lines, total, state, columns) {
  const isByTime = state.sort === "admitted_at" && !state.ascending;
  const ordered = isByTime ? lines.toSorted((one, other) => one.admitted_at - other.admitted_at) : lines;
  const points = (kind) => ordered.flatMap((line, place) => (kind(line) ? [[place + 1, line.reward ?? 0]] : []));
  const ofSeat = (column) => ordered.flatMap((line, place) => (line.reward === null && cell(line, column) !== null ? [[place + 1, cell(line, column)]] : []));
  const series = [
    { name: "training, reward above 0", hue: "hue0", kind: "dots", points: points((line) => !isFailed(line) && line.purpose === "train" && line.reward !== null) },
    { name: "evaluation or fork, reward above 0", hue: "hue2", kind: "dots", points: points((line) => !isFailed(line) && line.purpose !== "train" && line.reward !== null) },
    ...columns.filter(isOfSeat).map((name, place) => ({ name, hue: `hue${SEAT_HUES[place % SEAT_HUES.length]}`, kind: "dots", points: ofSeat(name) })),
    { name: "failed: dropped, or a reward of 0 or less", hue: "bad", kind: "dots", points: points((line) => isFailed(line)) },
  ].filter((each) => each.points.length);
  const which = lines.length < total ? ` of the ${number(lines.length)} episodes listed, of ${number(total)}` : "";
  const title = `Rewards${which}${isByTime ? ", oldest on the left" : ", in the order of the list"}`;
  return [element("h2", {}, title), chart(safeText(title), series, { height: 90, from: 1, to: lines.length, axis: "place" })];
}

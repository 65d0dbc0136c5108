// Time: an episode as lanes of bars, a run as charts under each other with one axis.

import { element, facts, problems } from "./dom.js";
import { clock, number, percent, seconds, shortName } from "./text.js";
import { card, chart, legend } from "./charts.js";
import { episodeAddress } from "./routes.js";

const KINDS = { turn: "hue0", tool: "hue2", effect: "hue4", wait: "waits", child: "hue3", reward: "hue1" };

/** An episode over its seconds. */
export function timelinePanel(line, episode) {
  const total = Math.max(line.seconds, 1e-9);
  const left = (at) => `${Math.min(Math.max((at / total) * 100, 0), 100)}%`;
  const marks = line.updates.map(([at, version]) => element("i", { class: "publish", css: { "--left": left(at) }, title: `${version} after ${seconds(at)}` }));
  const lanes = line.lanes.map((lane) =>
    element(
      "div",
      { class: "lane" },
      element("span", { class: "lanename" }, lane.name),
      element("div", { class: "track" }, marks.map((mark) => mark.cloneNode()), lane.bars.map((bar) => laneBar(bar, left, total, line, episode))),
    ),
  );
  const kinds = [...new Set(line.lanes.flatMap((lane) => lane.bars.map((bar) => bar.kind)))];
  return element(
    "div",
    { class: "lanes" },
    legend([...kinds.map((kind) => [kind, KINDS[kind] ?? "hue5", line.busy[kind] ? seconds(line.busy[kind]) : ""]), ...(line.updates.length ? [["new weights", "publishes", ""]] : [])]),
    lanes,
    axis(line.seconds),
    problems(line.problems),
  );
}

function laneBar(bar, left, total, line, episode) {
  const label = `${bar.label}: ${bar.stop > bar.start ? `${seconds(bar.stop - bar.start)}, ` : ""}from ${seconds(bar.start)}`;
  const width = `${Math.max(((bar.stop - bar.start) / total) * 100, 0)}%`;
  return element("a", { class: `bar ${KINDS[bar.kind] ?? "hue5"} ${bar.stop > bar.start ? "" : "moment"}`, "data-item": true, href: episodeAddress(episode, line.attempt, null, { call: bar.call }), css: { "--left": left(bar.start), "--width": width }, title: label }, element("span", { class: "unseen" }, label));
}

function axis(total) {
  return element("div", { class: "axis", "aria-hidden": "true" }, [0, 0.25, 0.5, 0.75, 1].map((share) => element("span", {}, seconds(total * share))));
}

/** A run over its seconds: what was in flight, who was busy, when versions came. */
export async function runView(page) {
  const line = await page.ask("run_timeline");
  const at = (values) => values.map((value, place) => [place * line.part, value]);
  const width = line.part;
  const range = { from: 0, to: line.seconds, axis: "seconds" };
  const flights = Object.entries(line.in_flight);
  const versions = policiesOf(line.versions);
  const resumes = { name: "resumed from a checkpoint", at: line.resumes };
  const stopped = line.stopped.reduce((sum, [from, until]) => sum + until - from, 0);
  return {
    title: "Timeline",
    content: [
      element("div", { class: "tiles" }, tile("lasted", seconds(line.seconds - stopped)), tile("began, UTC", clock(line.began)), stopped ? tile("stopped before resumes", seconds(stopped)) : null, [...versions].map(([policy, at]) => tile(versions.size > 1 ? `versions of ${policy} published` : "versions published", number(at.length))), Object.entries(line.idle).map(([who, share]) => tile(`${who} idle`, percent(share), share > 0.5 ? "warn" : ""))),
      problems(line.problems),
      card("Episodes in flight", chart("Episodes in flight", flights.map(([name, values], place) => ({ name: shortName(name), hue: `hue${place}`, width, points: at(values) })), { ...range, height: 130, marks: [resumes] })),
      card("Episodes ended", chart("Episodes ended", [{ name: "committed", hue: "hue2", kind: "bars", width, points: at(line.committed) }, { name: "dropped", hue: "bad", kind: "bars", width, points: at(line.dropped) }], range)),
      line.engine.some((share) => share !== null) ? card("Engine busy", chart("Engine busy", [{ name: "engine", hue: "hue0", width, points: at(line.engine) }], { ...range, share: true, percent: true, marks: [resumes] })) : null,
      Object.entries(line.trainers).map(([policy, shares], place) => card(`Trainer of ${policy} busy`, chart(`Trainer of ${policy} busy`, [{ name: "trainer", hue: `hue${place + 1}`, width, points: at(shares) }], { ...range, share: true, percent: true, marks: [{ name: "a version was published", at: versions.get(policy) ?? [] }] }))),
      element("p", { class: "quiet" }, `Where the engine’s chart has a gap, nothing was recorded.${stopped ? " Idle shares leave out the time in which the run was stopped: from the last event before a resume until the resume." : ""}`),
    ],
  };
}

function policiesOf(versions) {
  const found = new Map();
  for (const [at, version] of versions) {
    const policy = version.slice(0, version.lastIndexOf("@"));
    found.set(policy, [...(found.get(policy) ?? []), at]);
  }
  return found;
}

export function tile(name, value, kind = "") {
  return element("div", { class: `tile ${kind}` }, element("b", {}, value), element("span", {}, name));
}

export function tiles(entries) {
  return facts(entries, "facts wide");
}

// Who belongs together: an episode with its parent, its group and its children; and the forks of a run, as a tree.

import { chip, element, status } from "./dom.js";
import { number, plural, safeText, shortName } from "./text.js";
import { rewardBars, rewardsOf } from "./colors.js";
import { address, episodeAddress } from "./routes.js";
import { card, most } from "./charts.js";

/** The episode's relatives as nested lists; asks for what it needs. */
export async function familyPanel(page, view) {
  const line = view.summary;
  const [parents, group] = await Promise.all([line.parent ? relatives(page, "episode", line.parent) : [], relatives(page, "group", line.group)]);
  const members = group.length ? group : [line];
  const names = new Set(members.map((each) => each.episode));
  const parent = names.has(line.parent) ? null : parents[0]; // a branch is in the group of its parent
  const trunks = members.filter((each) => !names.has(each.parent));
  const children = view.children.filter((each) => !names.has(each.episode));
  const largest = most([...members, ...children].flatMap((each) => rewardsOf(each).map(Math.abs)));
  const heading = (name, lines) => element("span", { class: "quiet" }, `group ${name}, ${spread(lines)}`);
  const below = groups(children).map(([name, lines]) => element("li", {}, heading(name, lines), element("ul", {}, lines.map((each) => element("li", {}, node(each, largest))))));
  const item = (each) => {
    const isSelf = each.episode === line.episode;
    const inner = [...(isSelf ? below : []), ...members.filter((other) => other.parent === each.episode).map(item)];
    return element("li", {}, node(each, largest, isSelf), inner.length ? element("ul", {}, inner) : null);
  };
  const around = element("li", {}, heading(line.group, members), element("ul", {}, trunks.map(item)));
  const tree = element("ul", { class: "tree" }, parent ? element("li", {}, node(parent, largest), element("ul", {}, around)) : around);
  return card("Group and children", tree);
}

async function relatives(page, column, value) {
  const quote = value.includes('"') ? "'" : '"';
  const { lines } = await page.ask("episodes", { where: `${column} = ${quote}${value}${quote}`, sort: "episode", ascending: "1", limit: 1000 });
  const newest = new Map(lines.map((line) => [line.episode, line]));
  for (const line of lines) if (line.attempt > newest.get(line.episode).attempt) newest.set(line.episode, line);
  return [...newest.values()];
}

function groups(lines) {
  const found = new Map();
  for (const line of lines) found.set(line.group, [...(found.get(line.group) ?? []), line]);
  return [...found];
}

function spread(lines) {
  const seats = Map.groupBy(lines.flatMap((line) => Object.entries(line.rewards)), ([seat]) => seat);
  const means = [...seats].map(([seat, rewards]) => `mean reward ${seats.size > 1 ? `of ${seat} ` : ""}${number(rewards.reduce((sum, [, reward]) => sum + reward, 0) / rewards.length)}`);
  return [plural(lines.length, "episode"), ...means].join(", ");
}

function node(line, largest, isSelf = false, name = line.episode, extra = null) {
  const to = episodeAddress(name, line.attempt);
  return element(
    "div",
    { class: `relative ${isSelf ? "self" : ""}`, "data-item": true, tabindex: "-1", "data-to": to },
    element("a", { href: to, class: "id", "aria-current": isSelf ? "true" : null }, name),
    element("span", { class: "quiet" }, shortName(line.environment)),
    rewardBars(line, largest),
    status(line.status, line),
    line.drop_reason && !line.stop_reason ? chip(line.drop_reason, "bad", safeText(line.detail ?? "")) : null,
    extra,
  );
}

/** All forks of a run. */
export async function forksView(page) {
  const [run, tree] = await Promise.all([page.ask("run"), page.ask("forks")]);
  const largest = most(tree.flatMap((fork) => rewardsOf(fork.line).map(Math.abs)));
  return {
    title: "Forks",
    content: tree.length
      ? card("Forks", element("p", { class: "quiet" }, "An episode that was played on from one of its turns, and what came of it."), nested(tree.map((fork, place) => forkNode(tree, fork, place, largest)), tree.map((fork) => fork.depth)))
      : element("p", { class: "quiet" }, `This run has no forks. Make some: agentrl episode fork ${shellWord(run.path)} EPISODE --at TURN -n 4`),
  };
}

/** A path as a shell reads it. */
function shellWord(path) {
  return /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`;
}

function forkNode(tree, fork, place, largest) {
  if (!fork.depth) return node(fork.line, largest);
  const name = forkName(fork);
  const parent = parentOf(tree, place);
  const extra = [element("span", { class: "quiet" }, `at ${fork.at}`), fork.version ? chip(fork.version, "", "the weights that took its first turn of its own") : null, fork.is_edited ? chip("edited", "warn") : null, element("a", { href: address(["compare"], { a: name, b: parent }) }, "compare")];
  return node(fork.line, largest, false, name, extra);
}

function nested(nodes, depths, at = 0, depth = 0) {
  const list = element("ul", { class: depth ? "" : "tree" });
  for (let place = at; place < nodes.length && depths[place] >= depth; place += 1) {
    if (depths[place] > depth) continue;
    const item = element("li", {}, nodes[place]);
    if (depths[place + 1] > depth) item.append(nested(nodes, depths, place + 1, depth + 1));
    list.append(item);
  }
  return list;
}

export function forkName(fork) {
  return fork.depth ? `forks/${fork.line.episode}` : fork.line.episode;
}

/** The name of the episode that the fork at `place` of the tree was forked from. */
export function parentOf(tree, place) {
  for (let before = place - 1; before >= 0; before -= 1) if (tree[before].depth < tree[place].depth) return forkName(tree[before]);
  return null;
}

// Two episodes side by side, or a fork and its parent: act by act, with the first departure marked.

import { append, content, element, problems } from "./dom.js";
import { number, plural, told } from "./text.js";
import { palette, rewards, signed } from "./colors.js";
import { address, episodeAddress } from "./routes.js";
import { card, legend } from "./charts.js";
import { forkName, parentOf } from "./family.js";
import { paintedTokens } from "./tokens.js";
import { aligned, sampledOf } from "./difference.js";
import { parentOfFork } from "./episode.js";

const OFFERED = 8;
const DEPARTURES = { context: "they were told different things", sampled: "they said different things", act: "the act differs", ended: "one of them goes no further" };

export async function compareView(page, { parameters }) {
  const a = parameters.a ?? "";
  const b = parameters.b || (a ? await parentOfFork(page, a) : null) || "";
  const form = choice(page, a, b);
  if (!a || !b) return { title: "Compare", content: [form, await suggestions(page)] };
  const sides = await Promise.all([a, b].map((name) => side(page, name)));
  const { pairs, departure } = aligned(...sides);
  const hues = palette(sides.flatMap(({ tokens }) => tokens.rows.flatMap((row) => row.columns.version ?? [])));
  const same = departure ? pairs.findIndex((pair) => pair.call === departure.call) : pairs.length;
  return {
    title: `${a} and ${b}`,
    content: [
      form,
      element("p", { class: "verdict", role: "status" }, departure ? ["They part at ", element("a", { href: address(["compare"], { a, b, call: departure.call }) }, departure.call), `, after ${plural(same, "act")} alike: ${DEPARTURES[departure.kind]}${departure.token === undefined ? "" : `, from token ${departure.token} on`}.`] : "They are the same, but for times."),
      legend([...hues].map(([version, hue]) => [version, hue, ""])),
      problems(sides.flatMap(({ view }) => view.problems)),
      element("div", { class: "versus heads" }, sides.map(({ name, view }) => element("h2", {}, element("a", { href: episodeAddress(name), class: "id" }, name), " ", rewards(view.summary)))),
      same > 2 ? folded(pairs.slice(0, same - 1), sides, hues) : pairs.slice(0, Math.max(same - 1, 0)).map((pair) => pairRow(pair, sides, hues, departure)),
      pairs.slice(Math.max(same - 1, 0)).map((pair) => pairRow(pair, sides, hues, departure)),
    ],
  };
}

async function side(page, name) {
  const [view, tokens] = await Promise.all([page.ask("conversation", { episode: name }), page.ask("tokens", { episode: name })]);
  return { name, view, tokens };
}

function choice(page, a, b) {
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    page.go(address(["compare"], { a: form.get("a"), b: form.get("b") }));
  };
  const field = (name, value, hint) => element("label", {}, element("span", { class: "unseen" }, hint), element("input", { name, value, placeholder: hint, autocomplete: "off", spellcheck: "false" }));
  return element("form", { class: "query", on: { submit } }, field("a", a, "an episode, or forks/f0"), field("b", b, "another; its parent if empty"), element("button", { type: "submit" }, "Compare"));
}

/** Pairs worth a look: forks with their parents, the best and the worst of a group. */
async function suggestions(page) {
  const [tree, { lines }] = await Promise.all([page.ask("forks"), page.ask("episodes", { where: "purpose = train and committed_at != null", sort: "committed_at", limit: 200 })]);
  const link = (a, b, about) => element("li", {}, element("a", { href: address(["compare"], { a, b }) }, `${a} and ${b}`), element("span", { class: "quiet" }, about));
  const forks = tree.flatMap((fork, place) => (fork.depth ? [[forkName(fork), parentOf(tree, place)]] : [])).slice(0, OFFERED);
  const groups = new Map();
  for (const line of lines) groups.set(line.group, [...(groups.get(line.group) ?? []), line]);
  const pairs = [...groups.values()].flatMap(extremes).slice(0, OFFERED);
  return [
    element("p", { class: "quiet" }, "Two episodes side by side, up to their first difference. Type two ids, or choose:"),
    pairs.length ? card("Best and worst of a group", element("ul", { class: "offers" }, pairs.map(([seat, best, worst]) => link(best.episode, worst.episode, ` rewards ${seat ? `of ${seat} ` : ""}${number(best.reward)} and ${number(worst.reward)}`)))) : null,
    forks.length ? card("Forks and their parents", element("ul", { class: "offers" }, forks.map(([fork, parent]) => link(fork, parent, "")))) : null,
    pairs.length || forks.length ? null : element("p", { class: "quiet" }, "No group has episodes with different rewards yet, and there are no forks."),
  ];
}

/** The best and the worst episode of a group for each rewarded seat, which is named if there are several. */
function extremes(group) {
  const seats = Map.groupBy(group.flatMap(({ episode, rewards: found }) => Object.entries(found).map(([seat, reward]) => ({ seat, episode, reward }))), ({ seat }) => seat);
  return [...seats].flatMap(([seat, found]) => {
    const [best, worst] = [Math.max, Math.min].map((pick) => pick(...found.map(({ reward }) => reward)));
    return best > worst ? [[seats.size > 1 ? seat : "", ...[best, worst].map((each) => found.find(({ reward }) => reward === each))]] : [];
  });
}

function folded(pairs, sides, hues) {
  const holder = element("details", { class: "same" }, element("summary", {}, `${plural(pairs.length, "act")} alike`));
  holder.addEventListener("toggle", () => append(holder, pairs.map((pair) => pairRow(pair, sides, hues, null))), { once: true });
  return holder;
}

function pairRow({ call, left, right, found }, sides, hues, departure) {
  const isFirst = departure?.call === call;
  const cells = [left, right].map((act, place) => (act ? actCell(act, sides[place], found, hues) : element("div", { class: "absent" }, "nothing here")));
  return element("div", { class: `versus ${found ? "differs" : "alike"} ${isFirst ? "departure" : ""}`, "data-item": true, "data-call": call, tabindex: "-1" }, isFirst ? element("span", { class: "here" }, "they part here") : null, cells);
}

function actCell(act, { tokens, name }, found, hues) {
  const heading = { turn: () => `${act.seat}[${act.index}], turn ${act.turn}`, tool: () => act.name || "no tool", effect: () => act.name, child: () => act.child, reward: () => `${act.name === "reward" ? "reward" : `reward ${act.name}`} of ${act.seat}[${act.index}]`, spawn: () => `starts ${act.children.length}` }[act.kind]?.() ?? act.entry_kind;
  const label = element("header", {}, element("b", {}, heading), element("a", { class: "quiet", href: episodeAddress(name, null, null, { call: act.call }) }, "open"));
  return element("div", { class: "half" }, label, actBody(act, tokens, found, hues));
}

function actBody(act, tokens, found, hues) {
  if (act.kind === "reward") return signed(act.value);
  if (act.kind === "child") return Object.values(act.rewards).map((value) => signed(value));
  if (act.kind !== "turn") return content(told(act.observation ?? act.error ?? act.value ?? ""), "content small");
  const messages = found?.kind === "context" ? act.messages.map((message) => content(told(message.content ?? ""), "content small")) : null;
  const sampled = sampledOf(tokens, act);
  if (!sampled?.columns.text?.some(Boolean) || sampled.until - sampled.from > 4000) return [messages, content(act.text, "content reply")];
  const run = paintedTokens(sampled.columns, sampled.from, sampled.until, "version", hues);
  if (found?.kind === "sampled") [...run.childNodes].forEach((node, place) => node.classList.add(place < found.token ? "shared" : "own"));
  return [messages, element("pre", { class: "content reply", dir: "auto" }, run)];
}

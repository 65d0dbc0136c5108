// Two episodes side by side, or a fork and its parent: act by act, with the first departure marked.

import { append, content, element, problems } from "./dom.js";
import { plural, told } from "./text.js";
import { palette, signed } from "./colours.js";
import { address, episodeAddress } from "./routes.js";
import { legend } from "./charts.js";
import { paintedTokens } from "./tokens.js";
import { aligned, sampledOf } from "./difference.js";
import { parentOfFork } from "./episode.js";

const DEPARTURES = { context: "they were told different things", sampled: "they said different things", act: "the act differs", ended: "one of them goes no further" };

export async function compareView(page, { parameters }) {
  const a = parameters.a ?? "";
  const b = parameters.b || (a ? await parentOfFork(page, a) : null) || "";
  const form = choice(page, a, b);
  if (!a || !b) return { title: "Compare", content: [form, element("p", { class: "quiet" }, "Name two episodes, or a fork such as forks/f0 and nothing: it is then compared with its parent.")] };
  const sides = await Promise.all([a, b].map((name) => side(page, name)));
  const { pairs, departure } = aligned(...sides);
  const hues = palette(sides.flatMap(({ tokens }) => tokens.rows.flatMap((row) => row.columns.version ?? [])));
  const same = departure ? pairs.findIndex((pair) => pair.call === departure.call) : pairs.length;
  return {
    title: `${a} and ${b}`,
    content: [
      form,
      element("p", { class: "verdict", role: "status" }, departure ? ["They part at ", element("a", { href: address(["compare"], { a, b, call: departure.call }) }, departure.call), `, after ${plural(same, "act")} alike: ${DEPARTURES[departure.what]}${departure.token === undefined ? "" : `, from token ${departure.token} on`}.`] : "They are the same, but for times."),
      legend([...hues].map(([version, hue]) => [version, hue, ""])),
      problems(sides.flatMap(({ view }) => view.problems)),
      element("div", { class: "versus heads" }, sides.map(({ name, view }) => element("h2", {}, element("a", { href: episodeAddress(name), class: "id" }, name), " ", signed(view.summary.reward)))),
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
  const heading = { turn: () => `${act.seat}[${act.index}], turn ${act.turn}`, tool: () => act.name, effect: () => act.name, child: () => act.child, reward: () => `${act.name === "reward" ? "reward" : `reward ${act.name}`} of ${act.seat}[${act.index}]`, spawn: () => `starts ${act.children.length}` }[act.kind]?.() ?? act.what;
  const label = element("header", {}, element("b", {}, heading), element("a", { class: "quiet", href: episodeAddress(name, null, null, { call: act.call }) }, "open"));
  return element("div", { class: "half" }, label, actBody(act, tokens, found, hues));
}

function actBody(act, tokens, found, hues) {
  if (act.kind === "reward") return signed(act.value);
  if (act.kind === "child") return Object.values(act.rewards).map((value) => signed(value));
  if (act.kind !== "turn") return content(told(act.observation ?? act.error ?? act.value ?? ""), "content small");
  const messages = found?.what === "context" ? act.messages.map((message) => content(told(message.content ?? ""), "content small")) : null;
  const sampled = sampledOf(tokens, act);
  if (!sampled?.columns.text?.some(Boolean) || sampled.until - sampled.from > 4000) return [messages, content(act.text, "content reply")];
  const run = paintedTokens(sampled.columns, sampled.from, sampled.until, "version", hues);
  if (found?.what === "sampled") [...run.childNodes].forEach((node, place) => node.classList.add(place < found.token ? "shared" : "own"));
  return [messages, element("pre", { class: "content reply", dir: "auto" }, run)];
}

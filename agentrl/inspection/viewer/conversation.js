// What happened in an episode, act by act, in the order it was recorded. Replies are painted token by token.

import { append, chip, content, element, facts, isFailed } from "./dom.js";
import { number, percent, plural, seconds, shortName, told } from "./text.js";
import { palette, signed, versionChip } from "./colors.js";
import { address, episodeAddress } from "./routes.js";
import { paintChoice, paintedTokens, tokensByTurn } from "./tokens.js";

const LINES = 14;
const SHOWN = 2; // messages of a long context that are shown before its turn
const ROUTINE = new Set(["tool_call_id", "name"]); // fields of a tool’s message that only repeat which call it answers

/** The acts of an episode, as articles; `tokens` may come later, by the function it returns. */
export function conversationPanel(view, selected, nameOf) {
  const seats = [...new Set(view.acts.filter((act) => act.kind === "turn").map((act) => `${act.seat}[${act.index}]`))];
  const hues = palette(view.acts.flatMap((act) => (act.versions ?? []).map(([, version]) => version ?? "")));
  const replies = new Map();
  const updates = [...view.updates];
  const items = view.acts.flatMap((act, place) => {
    const before = [];
    while (act.kind === "turn" && updates.length && updates[0].at <= act.at) before.push(update(updates.shift()));
    const node = article(act, { seats, hues, replies, view, nameOf });
    if (place < view.inherited) node.classList.add("inherited");
    if (act.call === selected) node.classList.add("selected");
    return [...before, node];
  });
  if (view.inherited) items.splice(view.inherited, 0, element("p", { class: "divider" }, "Above: taken over from its parent. Below: its own."));
  const choice = element("div", { class: "paints" });
  const panel = element("div", {}, task(view.task, isFailed(view.summary)), choice, element("div", { class: "acts" }, items, view.acts.length ? null : element("p", { class: "quiet" }, "Nothing is recorded of it.")));
  return { panel, paint: (tokens) => paintReplies(tokens, replies, choice, panel) };
}

function article(act, context) {
  const make = { turn, tool, effect, spawn, child, reward }[act.kind] ?? other;
  const node = make(act, context);
  for (const [name, value] of Object.entries({ "data-item": "", "data-call": act.call, id: null, tabindex: "-1" })) if (value !== null) node.setAttribute(name, value);
  return node;
}

function task(value, isOpen) {
  if (value === null || value === undefined) return null;
  return element("details", { class: "task", open: isOpen }, element("summary", {}, "Task"), content(told(value)));
}

function turn(act, { seats, hues, replies, view, nameOf }) {
  const seat = `${act.seat}[${act.index}]`;
  const reply = content(act.text, "content reply");
  replies.set(`${act.seat} ${act.index} ${act.turn}`, { node: reply, act });
  const to = episodeAddress(nameOf(view), view.summary.attempt, "tokens", { seat: act.seat, index: act.index, row: act.row, turn: act.turn });
  return element(
    "article",
    { class: `act turn seat${seats.indexOf(seat) % 4}`, "data-to": to, "aria-label": `turn ${act.turn} of ${seat}` },
    element(
      "header",
      {},
      element("b", { class: "seat" }, act.index ? seat : act.seat),
      element("a", { href: to, class: "quiet" }, `turn ${act.turn}`),
      act.versions.map(([at, version], place) => [place ? element("span", { class: "quiet" }, `→ at token ${at}`) : null, version ? versionChip(version, hues) : null]),
      element("span", { class: "times" }, plural(act.tokens, "token"), " · ", seconds(act.seconds), act.waited > 0.001 ? ` · waited ${seconds(act.waited)}` : ""),
      act.pauses.map(([at, waited, why]) => chip(`${why.replaceAll("_", " ")} at token ${at}`, "warn", `nothing was sampled for ${seconds(waited)}`)),
      requested(act),
      act.finish_reason === "stop" ? null : chip(act.finish_reason, "warn"),
      act.drift ? chip("drift", "warn", `${act.drift === "undecodable" ? "its tokens are no valid text" : "its text would be tokenized differently"}; the tokens are kept and trained as sampled`) : null,
    ),
    beside(act.beside_messages),
    contextBefore(act.messages),
    written(act, reply),
  );
}

/** What the request of an external agent asked for, where it differs from the run's sampling. */
function requested({ asked = {}, ignored = [] }) {
  const fields = Object.entries(asked).map(([name, value]) => `${name} ${told(value)}`);
  const effect = ignored.length ? `without effect: ${ignored.join(", ")}` : null;
  return fields.length || effect ? chip(fields.join(", ") || "fields without effect", "", effect) : null;
}

/** A reply: its thinking, its text and its calls; what was sampled, token by token, is folded below. */
function written({ thinking, content: text, calls }, reply) {
  if (!thinking && !calls.length) return reply;
  return element(
    "div",
    { class: "calling" },
    thinking ? element("details", { class: "thinking", open: thinking.length < 1500 }, element("summary", {}, "thinking ", element("span", { class: "quiet" }, plural(thinking.length, "character"))), content(thinking)) : null,
    text ? content(text) : null,
    calls.length ? element("ul", { class: "calls", "aria-label": "tool calls" }, calls.map(toolCall)) : null,
    element("details", { class: "sampled" }, element("summary", {}, "as sampled"), reply),
  );
}

/** A tool call with its arguments by name; a malformed one as it was written, unless the reply's text shows that. */
function toolCall({ name, arguments: given, form }) {
  if (form && typeof form === "string" && typeof given === "string") return element("li", { class: "malformed" }, chip("malformed", "bad"), " ", element("b", {}, name), ` written as ${form}, which the run does not read`);
  if (typeof given === "string") return element("li", { class: "malformed" }, chip("malformed", "bad"), " ", element("b", {}, name || "no tool"), content(given, "content small"));
  const values = Object.entries(given);
  return element("li", {}, element("span", { class: "kind" }, "calls "), element("b", {}, name), values.length ? element("dl", {}, values.map(([key, value]) => [element("dt", {}, key), element("dd", {}, content(told(value), "content small"))])) : null);
}

/** What a prompt says besides its messages: the tools, and what else the chat template adds. */
function beside(text) {
  if (!text) return null;
  return element("details", { class: "beside-messages", open: text.length < 1500 }, element("summary", {}, "tools and other text of the chat template ", element("span", { class: "quiet" }, plural(text.length, "character"))), content(text));
}

/** What the policy was told before a turn: of many messages the last ones, and the others folded. */
function contextBefore(messages) {
  const hidden = messages.length > SHOWN + 1 ? messages.slice(0, -SHOWN) : [];
  const holder = element("details", { class: "context" }, element("summary", {}, `${plural(hidden.length, "earlier message")} of context`));
  holder.addEventListener("toggle", () => append(holder, hidden.map((message) => said(message))), { once: true });
  return [hidden.length ? holder : null, messages.slice(hidden.length).map((message) => said(message))];
}

/** A message the policy was told: long ones are folded. */
function said(message) {
  const role = String(message.role ?? "?");
  const extra = Object.entries(message).filter(([name]) => !["role", "content"].includes(name) && !(role === "tool" && ROUTINE.has(name)));
  const text = message.content === null || message.content === undefined ? "" : told(message.content);
  const lines = text.split("\n", LINES + 1).length;
  const body = element("div", {}, text ? content(text) : null, extra.length ? content(told(Object.fromEntries(extra)), "content extra") : null);
  if (lines <= LINES && text.length < 1500) return element("div", { class: `said ${role === "system" ? "system" : ""}` }, element("span", { class: "role" }, role), body);
  return element("details", { class: "said", open: role === "user" && text.length < 1500 }, element("summary", {}, element("span", { class: "role" }, role), element("span", { class: "quiet" }, plural(text.length, "character"))), body);
}

function tool(act) {
  return element(
    "article",
    { class: "act tool" },
    element("header", {}, element("span", { class: "kind" }, act.external ? "external tool" : "tool"), element("b", {}, act.name || "no tool"), typeof act.arguments === "string" ? chip("malformed", "bad") : null, element("span", { class: "times" }, seconds(act.seconds)), act.outcome === "ok" ? null : chip(act.outcome, "warn"), act.location ? element("span", { class: "quiet" }, `at ${act.location}`) : null),
    element("div", { class: "call" }, content(told(act.arguments), "content small"), element("span", { class: "gives", "aria-label": "gives" }, "→"), content(act.observation, "content small")),
  );
}

function effect(act) {
  return element(
    "article",
    { class: "act tool" },
    element("header", {}, element("span", { class: "kind" }, act.level ? `resource, ${act.level}` : `effect, ${act.guarantee}`), element("b", {}, act.name), element("span", { class: "times" }, seconds(act.seconds)), act.error ? chip("failed", "warn") : null),
    element("div", { class: "call" }, act.arguments === null ? null : content(told(act.arguments), "content small"), element("span", { class: "gives", "aria-label": "gives" }, "→"), content(act.error ?? told(act.value), "content small")),
  );
}

function spawn(act) {
  return element("article", { class: "act line" }, element("span", { class: "kind" }, "starts"), plural(act.children.length, "child", "children"), " of ", element("b", {}, shortName(act.environment)), element("a", { class: "quiet", href: address(["episodes"], { where: `episode ~ "${act.children[0]?.replace(/\d+$/, "") ?? ""}"` }) }, "list them"));
}

function child(act) {
  const rewards = Object.entries(act.rewards).map(([seat, value]) => [element("span", { class: "quiet" }, seat), signed(value)]);
  return element("article", { class: "act line", "data-to": episodeAddress(act.child) }, element("span", { class: "kind" }, "child"), element("a", { href: episodeAddress(act.child), class: "id" }, act.child), rewards, act.drop_reason ? chip(act.drop_reason, "bad") : null);
}

function reward(act) {
  return element("article", { class: "act line" }, element("span", { class: "kind" }, "reward"), element("b", {}, `${act.seat}[${act.index}]`), act.name === "reward" ? null : element("i", {}, act.name), act.weight === 1 ? null : element("span", { class: "quiet" }, `${act.weight} ×`), signed(act.value), act.turn === null ? null : element("span", { class: "quiet" }, `for turn ${act.turn}`));
}

function other(act) {
  if (act.entry_kind === "branch" && Array.isArray(act.value?.children)) return branch(act.value.children.map(String));
  const nothing = act.entry_kind === "score" ? element("span", { class: "quiet" }, "none: the scorer does not score this turn") : null;
  return element("article", { class: "act line" }, element("span", { class: "kind" }, act.entry_kind ?? act.kind), act.value === null || act.value === undefined ? nothing : content(told(act.value), "content small"));
}

function branch(names) {
  return element("article", { class: "act line" }, element("span", { class: "kind" }, "branches into"), names.map((name) => element("a", { href: episodeAddress(name), class: "id" }, name)));
}

function update(published) {
  return element("p", { class: "divider update" }, "new weights: ", element("b", {}, published.version), ` after ${seconds(published.at)}`);
}

/** Put the tokens of each reply in the place of its text, where their texts are known. */
function paintReplies(tokens, replies, choice, panel) {
  const byTurn = tokensByTurn(tokens);
  const hues = palette(tokens.rows.flatMap((row) => row.columns.version ?? []));
  const known = [...replies].filter(([key]) => byTurn.get(key)?.columns.text?.some(Boolean));
  if (!known.length) return;
  const draw = (paint) => {
    for (const [key, { node, act }] of known) {
      const { columns, from, until } = byTurn.get(key);
      if (until - from > 4000) continue;
      const run = paintedTokens(columns, from, until, paint, hues);
      for (const [at, waited] of act.pauses) run.querySelector(`[data-at="${from + at}"]`)?.before(element("span", { class: "pause" }, `‖ ${seconds(waited)} `));
      node.querySelector(".content").replaceChildren(run);
    }
  };
  choice.replaceChildren(...paintChoice(tokens, hues, draw, panel));
}

/** What an episode got: by agent, and its metrics. */
export function outcome(view) {
  const agents = view.agents.map((agent) => [`${agent.seat}[${agent.index}]`, [signed(agent.reward), " ", element("span", { class: "quiet" }, `${agent.policy}, ${plural(agent.tokens, "token")}`)]]);
  const metrics = Object.entries(view.metrics).map(([name, value]) => [name, /(^|[/_])(share|rate)$/.test(name) && value <= 1 ? percent(value) : number(value)]);
  return [agents.length ? element("div", {}, element("h3", {}, "Rewards"), facts(agents)) : null, metrics.length ? element("div", {}, element("h3", {}, "Metrics"), facts(metrics)) : null];
}

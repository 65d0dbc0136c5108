// One episode: its head, and the parts of it as tabs.

import { chip, element, facts, problems, status } from "./dom.js";
import { clock, number, plural, seconds, shortName, told } from "./text.js";
import { rewards, versionChip } from "./colors.js";
import { address, episodeAddress } from "./routes.js";
import { card } from "./charts.js";
import { conversationPanel, outcome } from "./conversation.js";
import { tokensPanel } from "./tokens.js";
import { familyPanel, forkName, parentOf } from "./family.js";
import { listed } from "./list.js";

const TABS = [
  ["conversation", "Conversation"],
  ["tokens", "Tokens"],
  ["why", "Why"],
  ["family", "Group and children"],
];

export async function episodeView(page, { parts: [name, tab = "conversation"], parameters }) {
  const named = { episode: name, attempt: parameters.attempt };
  const view = await page.ask("conversation", named);
  const panel = await panels[tab]?.(page, view, named, parameters);
  if (!panel) throw new Error(`there is no part ${tab} of an episode`);
  return {
    title: name,
    content: [head(name, view.summary), detail(view), problems(view.problems), view.note ? element("p", { class: "quiet" }, view.note) : null, tabs(name, tab, parameters.attempt), element("div", { class: "panel", id: "panel" }, panel)],
    up: listed.from ?? address(["episodes"]),
  };
}

const panels = {
  conversation: async (page, view, named, { call }) => {
    const { panel, paint } = conversationPanel(view, call, () => named.episode);
    page.later(page.ask("tokens", named).then(paint));
    return element("div", { class: "beside" }, panel, element("aside", { class: "outcome" }, outcome(view)));
  },
  tokens: async (page, view, named, parameters) => {
    const tokens = await page.ask("tokens", named);
    return [problems(tokens.problems), tokensPanel(tokens, parameters)];
  },
  why: async (page, view, named) => card(null, why(await page.ask("reasons", named))),
  family: (page, view) => familyPanel(page, view),
};

function head(name, line) {
  const [before, after] = neighbors();
  const links = [
    before ? element("a", { href: before, id: "before", title: "the previous episode of the list  [" }, "← previous") : null,
    after ? element("a", { href: after, id: "after", title: "the next episode of the list  ]" }, "next →") : null,
  ];
  return element(
    "div",
    { class: "head" },
    element("h1", {}, element("span", { class: "id" }, name), line.attempt ? element("span", { class: "quiet" }, ` attempt ${line.attempt}`) : null),
    status(line.status, line),
    line.purpose === "train" ? null : chip(line.purpose),
    name.startsWith("forks/") ? element("a", { href: address(["compare"], { a: name }) }, "compare with its parent") : null,
    element("span", { class: "quiet", title: line.environment }, shortName(line.environment)),
    element("nav", { class: "neighbors", "aria-label": "Other episodes" }, links),
  );
}

function neighbors() {
  const bare = (hash) => hash.split("?")[0].split("/").slice(0, 3).join("/");
  const place = listed.addresses.findIndex((each) => bare(each) === bare(location.hash));
  return place < 0 ? [null, null] : [listed.addresses[place - 1], listed.addresses[place + 1]];
}

const SHOWN = 300; // characters of a task’s data in the head of an episode

function shortened(text) {
  return text.length > SHOWN ? `${text.slice(0, SHOWN)} …` : text;
}

/** The sampling settings of each seat in words; one line if all seats have the same. */
function settingsOf(view) {
  const seats = Object.entries(view.settings).filter(([seat]) => seat || Object.keys(view.settings).length === 1);
  const texts = seats.map(([seat, { temperature, max_tokens: tokens, max_turns: turns, max_context: context }]) => [seat, `temperature ${temperature}, at most ${plural(tokens, "token")} a turn, ${plural(turns, "turn")}, context ${number(context)}`]);
  return new Set(texts.map(([, text]) => text)).size > 1 ? texts : texts.slice(0, 1).map(([, text]) => ["", text]);
}

function detail(view) {
  const { summary: line, measured_against: against, task } = view;
  const settings = settingsOf(view);
  return [
    facts(
      [
        ["reward", rewards(line)],
        ["ended", line.drop_reason && !line.stop_reason ? element("span", { class: "bad" }, `dropped: ${line.drop_reason}`) : line.stop_reason],
        ["turns", line.turns],
        ["tokens", line.tokens === null ? null : number(line.tokens)],
        ["took", line.seconds === null ? null : seconds(line.seconds)],
        ["staleness", line.staleness],
        ["seats", Object.entries(line.seats).map(([seat, policy]) => chip(seat === policy ? seat : `${seat}: ${policy}`))],
        ["task", [line.task, task === null ? null : element("span", { class: "quiet" }, " ", shortened(told(task)))]],
        ["settings", settings.length ? settings.map(([seat, text]) => element("div", {}, seat ? element("span", { class: "quiet" }, `${seat}: `) : null, text)) : null],
        ["parent", line.parent ? element("a", { href: episodeAddress(line.parent), class: "id" }, line.parent) : null],
        ["began, UTC", clock(line.admitted_at)],
        ["measured against", against.length ? against.map((version) => versionChip(version)) : null],
      ],
      "facts wide",
    ),
    line.detail ? element("p", { class: line.drop_reason && !line.stop_reason ? "problem" : "quiet" }, line.detail) : null,
  ];
}

function tabs(name, current, attempt) {
  return element("nav", { class: "tabs", "aria-label": "Parts of the episode" }, TABS.map(([tab, label], place) => element("a", { href: episodeAddress(name, attempt, tab === "conversation" ? null : tab), "aria-current": tab === current ? "page" : null, title: `${place + 1}` }, label)));
}

function why(reasons) {
  return element("dl", { class: "why" }, reasons.map((reason) => element("div", { class: reason.about === "problem" ? "problem" : "" }, element("dt", {}, reason.about), element("dd", {}, reason.text, reason.advice ? element("p", { class: "advice" }, reason.advice) : null))));
}

/** The parent of a fork, by its name, where it is one. */
export async function parentOfFork(page, name) {
  const tree = await page.ask("forks");
  const place = tree.findIndex((fork) => fork.depth && forkName(fork) === name);
  return place < 0 ? null : parentOf(tree, place);
}

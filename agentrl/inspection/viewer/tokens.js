// Tokens: each as it is, painted by what is asked; and all that is known of one.

import { append, element, facts } from "./dom.js";
import { number, percent, safeText } from "./text.js";
import { PAINTS, painter, palette, versionChip } from "./colors.js";
import { card, legend } from "./charts.js";
import { amend } from "./routes.js";
import { recall, remember } from "./sources.js";

const WINDOW = 3_000;
const PAINT = "agentrl paint";
const FOLDED = 60; // of a longer stretch of context only the end is shown
const LEFT = 20; // so much of it

/** Where the sampled tokens of each turn lie: by "seat index turn". */
export function tokensByTurn(tokens) {
  const found = new Map();
  for (const { seat, index, columns, count } of tokens.rows) {
    for (let at = 0; at < count; at += 1) {
      if (!columns.loss_mask[at]) continue;
      const key = `${seat} ${index} ${columns.turn[at]}`;
      const known = found.get(key);
      if (known) known.until = at + 1;
      else found.set(key, { columns, from: at, until: at + 1 });
    }
  }
  return found;
}

/** Tokens `from` to `until` of a row as elements, each with its place in `data-at`. */
export function paintedTokens(columns, from, until, paint, hues) {
  const color = painter(paint, columns, hues);
  const run = document.createDocumentFragment();
  for (let at = from; at < until; at += 1) {
    const node = element("span", { class: `token ${columns.loss_mask[at] ? "sampled" : "context"}`, "data-at": at });
    append(node, [columns.text?.[at] ? tokenText(columns.text[at]) : element("small", {}, columns.id[at])]);
    color(node, at);
    run.append(node);
  }
  return run;
}

/** Newlines are seen, and kept. */
function tokenText(text) {
  return text.split("\n").flatMap((piece, place) => (place ? [element("span", { class: "newline" }, "⏎"), "\n", piece] : [piece]));
}

/** Buttons for the ways to paint that these tokens have, and a legend; draws at once, and whenever one is chosen. */
export function paintChoice(tokens, hues, draw, panel) {
  const has = (name) => tokens.rows.some((row) => row.columns[name]);
  const possible = PAINTS.filter((paint) => has(paint.needs));
  const kept = recall(PAINT);
  let chosen = possible.find((paint) => paint.name === kept)?.name ?? possible[0]?.name;
  const note = element("div", { class: "legendline" });
  const buttons = possible.map((paint) => element("button", { type: "button", title: paint.tells, on: { click: () => choose(paint.name) } }, paint.label));
  function choose(name) {
    chosen = name;
    remember(PAINT, name);
    show();
  }
  function show() {
    if (!chosen) return;
    possible.forEach((paint, place) => buttons[place].setAttribute("aria-pressed", String(paint.name === chosen)));
    const { tells, kind } = PAINTS.find((paint) => paint.name === chosen);
    const swatches = kind === "heat" ? [[tells, "heat", ""]] : kind === "signed" ? [["up", "raised", ""], ["down", "lowered", tells]] : chosen === "version" ? [...hues].map(([version, hue]) => [version, hue, ""]) : [[tells, chosen === "mask" ? "marked" : "hue0", ""]];
    note.replaceChildren(legend(swatches));
    draw(chosen);
    panel.dataset.paint = chosen;
  }
  show();
  return [element("div", { class: "segments", role: "group", "aria-label": "Paint tokens by" }, buttons), note];
}

/** All rows of an episode, and what is known of the chosen token. */
export function tokensPanel(tokens, parameters) {
  const hues = palette(tokens.rows.flatMap((row) => row.columns.version ?? []));
  const inspector = element("aside", { class: "inspector", "aria-live": "polite", "aria-label": "The chosen token" }, element("p", { class: "quiet" }, "Choose a token: click, or ← and →."));
  const trainedFirst = [...tokens.rows].sort((one, other) => (one.step === null) - (other.step === null));
  const rows = trainedFirst.map((row, place) => tokenRow(row, place === 0, parameters, hues, inspector));
  const choice = element("div", { class: "paints" });
  const panel = element("div", { class: "tokenview" }, element("div", {}, choice, rows.map((row) => row.node)), inspector);
  choice.append(...paintChoice(tokens, hues, (paint) => rows.forEach((row) => row.draw(paint)), panel));
  if (!tokens.rows.length) return element("p", { class: "quiet" }, "It sampled nothing.");
  return panel;
}

function tokenRow(row, isFirst, parameters, hues, inspector) {
  const isNamed = parameters.seat === undefined ? isFirst : parameters.seat === row.seat && Number(parameters.index ?? 0) === row.index && Number(parameters.row ?? 0) === row.row;
  let chosen = isNamed && parameters.token in row.columns.id ? Number(parameters.token) : null;
  const turnStart = isNamed && parameters.turn !== undefined ? row.columns.turn.indexOf(Number(parameters.turn)) : -1;
  let from = Math.floor(Math.max(chosen ?? turnStart, 0) / WINDOW) * WINDOW;
  let until = Math.min(from + WINDOW, row.count);
  let paint = null;
  const opened = new Set();
  const firstSampled = row.columns.loss_mask?.findIndex(Boolean) ?? -1;
  const strip = element("pre", { class: "content tokens", tabindex: "0", "aria-label": `tokens of ${row.seat}[${row.index}]`, on: { click: pick, keydown: step } });
  const before = element("button", { type: "button", class: "more", on: { click: () => draw(paint, Math.max(from - WINDOW, 0)) } }, "tokens before");
  const after = element("button", { type: "button", class: "more", on: { click: () => draw(paint, from, Math.min(until + WINDOW, row.count)) } }, "more tokens");

  function draw(wanted, newFrom = from, newUntil = until) {
    [paint, from, until] = [wanted, newFrom, newUntil];
    const folds = contextStretches(row.columns, from, until).filter(([start, end]) => !opened.has(start) && !(chosen !== null && chosen >= start && chosen < end));
    strip.replaceChildren(...turnMarks(paintedTokens(row.columns, from, until, paint, hues), row, folds, (start) => opened.add(start) && draw(paint)));
    [before.hidden, after.hidden] = [from === 0, until === row.count];
    if (chosen !== null) choose(chosen);
    else if (isNamed) strip.querySelector(`[data-at="${firstOf(turnStart)}"]`)?.classList.add("arrived");
  }
  /** The first sampled token of the turn that is asked for, or of all. */
  function firstOf(start) {
    if (start < 0) return firstSampled;
    const sampled = row.columns.loss_mask.findIndex((mask, at) => at >= start && mask);
    return sampled < 0 ? start : sampled;
  }
  function pick(event) {
    const at = event.target.closest?.("[data-at]")?.dataset.at;
    if (at !== undefined) choose(Number(at), true);
  }
  function step(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1, l: 1, h: -1 }[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = chosen === null ? Math.max(firstSampled, from) : chosen + move;
    if (next >= 0 && next < row.count) choose(next, true);
  }
  function choose(at, isNew = false) {
    if (at < from || at >= until) draw(paint, Math.floor(at / WINDOW) * WINDOW, Math.min(Math.floor(at / WINDOW) * WINDOW + WINDOW, row.count));
    chosen = at;
    if (!strip.querySelector(`[data-at="${at}"]`)) return draw(paint);
    document.querySelectorAll(".token.chosen").forEach((node) => node.classList.remove("chosen"));
    const node = strip.querySelector(`[data-at="${at}"]`);
    node?.classList.add("chosen");
    if (isNew) amend({ seat: row.seat, index: row.index, row: row.row, turn: null, token: at });
    node?.scrollIntoView({ block: "nearest" });
    inspector.replaceChildren(...tokenFacts(row, at, hues));
    inspector.classList.add("open");
  }

  const title = `${row.seat}${row.index ? `[${row.index}]` : ""}${row.row ? `, row ${row.row}` : ""}`;
  const trained = row.columns.loss_mask?.filter(Boolean).length ?? 0;
  const about = element("p", { class: "quiet" }, `${number(row.count)} tokens, ${number(trained)} sampled by ${row.policy}; `, row.step ? ["trained by the step that made ", element("b", {}, row.step)] : "no step's columns are there");
  return { node: card(title, about, before, strip, after), draw };
}

/** Stretches of context that are folded: [start, end] without the last tokens before what was sampled. */
function contextStretches(columns, from, until) {
  const found = [];
  let start = null;
  for (let at = from; at <= until; at += 1) {
    const isContext = at < until && !columns.loss_mask[at];
    if (isContext && start === null) start = at;
    if (isContext || start === null) continue;
    if (at - start > FOLDED) found.push([start, at - LEFT]);
    start = null;
  }
  return found;
}

/** A small mark where a turn begins; folded stretches of context are a button. */
function turnMarks(run, row, folds, open) {
  const found = [];
  let last = null;
  for (const node of [...run.childNodes]) {
    const at = Number(node.dataset.at);
    const turn = row.columns.turn[at];
    if (turn !== last) found.push(element("span", { class: "turnmark" }, `turn ${turn}`));
    last = turn;
    const fold = folds.find(([start, end]) => at >= start && at < end);
    if (!fold) found.push(node);
    else if (at === fold[0]) found.push(element("button", { type: "button", class: "fold", on: { click: () => open(fold[0]) } }, `${number(fold[1] - fold[0])} tokens of context`));
  }
  return found;
}

function tokenFacts(row, at, hues) {
  const of = (name) => row.columns[name]?.[at];
  const likely = (value) => (value === null || value === undefined ? null : `${number(value, 4)} (${percent(Math.exp(value))})`);
  const text = of("text");
  return [
    element("h2", {}, element("span", { class: "big" }, text ? JSON.stringify(text).slice(1, -1) : `#${of("id")}`)),
    facts([
      ["id", String(of("id"))],
      ["place", `${at} in its row, turn ${of("turn")}`],
      ["loss mask", of("loss_mask") ? "1: sampled" : "0: context"],
      ["version", of("version") ? versionChip(of("version"), hues) : null],
      ["log-probability", likely(of("logprob"))],
      ["the trainer’s", likely(of("trainer_logprob"))],
      ["ratio", of("ratio") === undefined || of("ratio") === null ? null : number(of("ratio"), 5)],
      ["advantage", of("advantage") === undefined || of("advantage") === null ? null : number(of("advantage"), 4)],
      ["entropy", of("entropy") === undefined || of("entropy") === null ? null : number(of("entropy"), 4)],
      ["kept set", of("kept") ? (of("kept") < 0 ? `all but ${-of("kept")} tokens` : `${of("kept")} tokens`) : null],
      ["staleness", of("lag") ?? null],
      ["routing", of("routing") ? safeText(of("routing")) : null],
      ...Object.entries(row.recorded).map(([name, values]) => [name, values[at] === null ? null : number(values[at], 5)]),
    ]),
  ];
}

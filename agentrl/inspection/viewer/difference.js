// Where two episodes part, by call and by token: the rules of agentrl/inspection/comparisons.py. Knows no elements.

import { tokensByTurn } from "./tokens.js";

const TIMES = new Set(["seconds", "at", "waited", "cached_tokens", "tokens", "versions", "pauses"]);

/** Acts side by side by call, and the first departure: { call, kind, token } or null. */
export function aligned(a, b) {
  const [ours, theirs] = [a, b].map(({ view }) => new Map(view.acts.map((act) => [act.call, act])));
  const turns = [a, b].map(({ tokens }) => turnTokens(tokens));
  const calls = [...new Set([...ours.keys(), ...theirs.keys()])];
  let departure = null;
  const pairs = calls.map((call) => {
    const [left, right] = [ours.get(call), theirs.get(call)];
    const found = departs(left, right, turns);
    if (found && !departure) departure = { call, ...found };
    return { call, left, right, found };
  });
  return { pairs, departure };
}

function departs(left, right, turns) {
  if (!left || !right) return { kind: "ended" };
  if (left.kind === "turn" && right.kind === "turn") return turnDeparts(...[left, right].map((act, side) => turns[side].get(turnKey(act)) ?? { context: [], sampled: [] }));
  return comparable(left) === comparable(right) ? null : { kind: "act" };
}

function turnDeparts(left, right) {
  for (const kind of ["context", "sampled"]) {
    const token = firstDifference(left[kind], right[kind]);
    if (token !== null) return { kind, token };
  }
  return null;
}

function firstDifference(left, right) {
  const shorter = Math.min(left.length, right.length);
  for (let at = 0; at < shorter; at += 1) if (left[at] !== right[at]) return at;
  return left.length === right.length ? null : shorter;
}

function comparable(act) {
  return JSON.stringify(act, (name, value) => (TIMES.has(name) ? undefined : value));
}

export function turnKey(act) {
  return `${act.seat} ${act.index} ${act.turn}`;
}

/** By turn: the ids it was told since the last one, and those it said. */
function turnTokens(tokens) {
  const found = new Map();
  for (const { seat, index, columns, count } of tokens.rows) {
    for (let at = 0; at < count; at += 1) {
      const key = `${seat} ${index} ${columns.turn[at]}`;
      if (!found.has(key)) found.set(key, { context: [], sampled: [] });
      found.get(key)[columns.loss_mask[at] ? "sampled" : "context"].push(columns.id[at]);
    }
  }
  return found;
}

/** Where the sampled tokens of an act lie in its row. */
export function sampledOf(tokens, act) {
  return tokensByTurn(tokens).get(turnKey(act));
}

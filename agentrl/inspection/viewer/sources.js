// Where answers come from: the server that gave this page, or the file that it is. Both answer the same questions, which
// agentrl/inspection/viewer/queries.py names: `ask(question, parameters)` gives a promise of the answer.

import { cell, parseWhere } from "./where.js";
import { namedRun } from "./routes.js";
import { told } from "./text.js";

const TOKEN = "agentrl token";
const KEPT = 24;

/** The source of this page. */
export function openSource() {
  return document.querySelector(".block") ? new FileSource() : new ServedSource();
}

/** Move the server's token from the address into the browser's memory. A `token=` of few characters is a place in an episode. */
export function takeToken() {
  const pattern = /[#&?]token=([\w-]{40,})/;
  const given = location.hash.match(pattern);
  if (!given) return;
  remember(TOKEN, given[1]);
  history.replaceState(null, "", `${location.pathname}${location.hash.replace(pattern, "")}`);
}

/** Asks the server. Its token came in the address, behind `#`, and goes with each question as a header. */
class ServedSource {
  isLive = true;

  async ask(question, parameters = {}) {
    const given = Object.entries({ run: namedRun(), ...parameters }).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const address = `ask/${question}?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}`;
    const headers = { Authorization: `Bearer ${recall(TOKEN) ?? ""}` };
    let response; // the address is relative: a proxy may serve the viewer below a path
    try {
      response = await fetch(address, { headers, cache: "no-store" });
    } catch {
      throw new Error("`agentrl run serve` does not answer any more: start it again, and open the address it prints.");
    }
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
  }
}

/** Unpacks what the file holds: first its index, an episode's answers when they are asked for. */
class FileSource {
  isLive = false;
  #opened = new Map();
  #index = this.#unpack(0);

  async ask(question, parameters = {}) {
    if (question === "pulse") return { ended: true, newest: null };
    if (question === "episodes") return this.#episodes(parameters);
    if (question === "run") return { ...(await this.#value("run")), all: (await this.#index).all };
    if (question === "series") return this.#value(`series ${parameters.metric}`);
    if (question === "step") return this.#value(`step ${parameters.policy} ${parameters.lineage} ${parameters.step}`);
    if (parameters.episode === undefined) return this.#value(question);
    const attempt = parameters.attempt ?? (await this.#newest(parameters.episode));
    return (await this.#value(`episode ${parameters.episode} ${attempt}`))[question];
  }

  async #value(name) {
    const { blocks } = await this.#index;
    if (!Object.hasOwn(blocks, name)) throw new Error(`This file does not hold ${name}. Export more of the run, or serve it: agentrl run serve`);
    if (!this.#opened.has(name)) {
      this.#opened.set(name, this.#unpack(blocks[name]));
      const first = [...this.#opened.keys()].find((key) => key.startsWith("episode ") && key !== name);
      if (first && this.#opened.size > KEPT) this.#opened.delete(first);
    }
    return checked(await this.#opened.get(name));
  }

  async #unpack(block) {
    const packed = Uint8Array.from(atob(document.getElementById(`block${block}`).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }

  async #newest(episode) {
    const { blocks } = await this.#index;
    const attempts = Object.keys(blocks).filter((name) => name.startsWith(`episode ${episode} `));
    return Math.max(0, ...attempts.map((name) => Number(name.split(" ").pop())));
  }

  async #episodes({ where = "", match = "", sort = "", ascending = "", limit = 100, offset = 0 }) {
    const { columns } = await this.#value("run");
    const passes = parseWhere(where, columns);
    let lines = (await this.#value("episodes")).filter(passes);
    if (match.trim()) lines = await this.#matching(lines, match);
    const by = sort || "admitted_at";
    if (!Object.hasOwn(columns, by)) throw new Error(`${by} is not a column`);
    const direction = ascending ? 1 : -1;
    const later = (line) => (sort ? 0 : Number(line.purpose !== "train")); // unless a column is asked for, training comes first
    lines = lines
      .map((line) => [cell(line, by), line])
      .sort(([a, one], [b, other]) => later(one) - later(other) || (a === null) - (b === null) || direction * compare(a, b) || direction * (one.admitted_at - other.admitted_at))
      .map(([, line]) => line);
    return { total: lines.length, lines: lines.slice(Number(offset), Number(offset) + Number(limit)) };
  }

  async #matching(lines, match) {
    const phrases = match.split('"').flatMap((part, place) => (place % 2 ? [part] : part.split(/\s+/))).map(words).filter((phrase) => phrase.trim());
    const found = [];
    for (const line of lines) {
      const answers = await this.#unpack((await this.#index).blocks[`episode ${line.episode} ${line.attempt}`]);
      const texts = answers.conversation?.acts.map(actText) ?? [];
      if (texts.some((text) => phrases.every((phrase) => text.includes(phrase)))) found.push(line);
    }
    return found;
  }
}

function checked(answer) {
  if (answer?.error && Object.keys(answer).length === 1) throw new Error(answer.error);
  return answer;
}

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

/** Words in lower case between single spaces, so that a phrase is found as it is written. */
function words(text) {
  return ` ${(text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []).join(" ")} `;
}

function actText(act) {
  const parts = { turn: [...(act.messages ?? []).map((message) => told(message.content ?? "")), act.text], tool: [act.name, act.arguments, act.observation, act.outcome], effect: [act.name, act.arguments, act.value, act.error ?? ""] };
  return words((parts[act.kind] ?? []).map(told).join(" "));
}

/** What this browser keeps for the page; nothing where it keeps nothing. */
export function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // a browser that stores nothing: the choice holds until the page is closed
  }
}

// The filter language of `--where`, for a page that has its episodes with it: `reward < 0 and not (turns > 4)`.
// The same language as agentrl/inspection/where_filter.py; a test holds them against each other.

const TOKEN = /\s*(?:([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.#~/]))|("[^"]*"|'[^']*')|(<=|>=|!=|<>|==|=|<|>|~)|([()])|([^\s()<>=!~"']+))/y;
const KINDS = ["number", "quoted", "operator", "bracket", "word"];
const COMPARE = {
  "=": (a, b) => a === b,
  "!=": (a, b) => a !== b,
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};
const ALIASES = { "==": "=", "<>": "!=" };

/** A function from an episode's line to whether it passes; throws an Error in words. */
export function parseWhere(text, columns) {
  if (!text.trim()) return () => true;
  const parser = new WhereParser(whereTokens(text), columns);
  const passes = parser.any();
  if (parser.tokens.length) throw new Error(`expected \`and\` or \`or\` before ${parser.tokens[0][1]}`);
  return (line) => passes(line) === true;
}

function whereTokens(text) {
  const found = [];
  const end = text.trimEnd().length;
  for (TOKEN.lastIndex = 0; TOKEN.lastIndex < end; ) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) throw new Error(`cannot read ${text.slice(at, at + 20)}: write column operator value`);
    const place = match.slice(1).findIndex((group) => group !== undefined);
    found.push([KINDS[place], match[place + 1]]);
  }
  return found;
}

// A comparison with nothing is neither true nor false, as in SQL: null.
class WhereParser {
  constructor(tokens, columns) {
    this.tokens = tokens;
    this.columns = columns;
  }

  any() {
    const parts = [this.all()];
    while (this.keyword("or")) parts.push(this.all());
    return (line) => parts.some((part) => part(line) === true);
  }

  all() {
    const parts = [this.term()];
    while (this.keyword("and")) parts.push(this.term());
    return (line) => parts.every((part) => part(line) === true);
  }

  term() {
    if (this.keyword("not")) {
      const inner = this.term();
      return (line) => inner(line) !== true;
    }
    if (this.tokens[0]?.[1] === "(") {
      this.tokens.shift();
      const inner = this.any();
      if (this.tokens.shift()?.[1] !== ")") throw new Error("a bracket is not closed");
      return inner;
    }
    return this.comparison();
  }

  comparison() {
    const [kind, name] = this.tokens.shift() ?? ["end", ""];
    const column = kind === "word" && Object.hasOwn(this.columns, name) ? this.columns[name] : undefined;
    if (!column) throw new Error(name ? `${name} is not a column; there are: ${Object.keys(this.columns).join(", ")}` : "a condition is missing");
    const [operatorKind, operator] = this.tokens.shift() ?? ["end", ""];
    if (operatorKind !== "operator") throw new Error(`expected one of = != < <= > >= ~ after ${name}`);
    const [valueKind, text] = this.tokens.shift() ?? ["end", ""];
    if (!["number", "quoted", "word"].includes(valueKind)) throw new Error(`expected a value after ${name} ${operator}`);
    const plain = ALIASES[operator] ?? operator;
    if (valueKind === "word" && /^(null|none)$/i.test(text) && ["=", "!="].includes(plain)) {
      return (line) => (cell(line, name) === null) === (plain === "=");
    }
    return compared(name, column, plain, valueKind === "quoted" ? text.slice(1, -1) : text);
  }

  keyword(word) {
    const [kind, text] = this.tokens[0] ?? [];
    if (kind !== "word" || text.toLowerCase() !== word) return false;
    this.tokens.shift();
    return true;
  }
}

function compared(name, column, operator, text) {
  if (operator === "~") return (line) => cell(line, name) !== null && String(cell(line, name)).includes(text);
  const value = column === "number" ? Number(text) : text;
  if (Number.isNaN(value)) throw new Error(`${name} is compared with a number, not with ${text}`);
  const compare = COMPARE[operator];
  return (line) => cell(line, name) !== null && compare(cell(line, name), value);
}

/** What a column holds, as the database has it. */
export function cell(line, name) {
  const value = line[name] ?? null;
  if (name.startsWith("reward/")) return line.rewards[name.slice("reward/".length)] ?? null;
  if (name === "policies") return value.join(",") || null;
  return name === "seats" ? JSON.stringify(value) : value;
}

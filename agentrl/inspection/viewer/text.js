// Text: what content and numbers look like on the page. Knows no elements.

// Every control, bidirectional and invisible character, as in agentrl/core/text.py; newline and tab stay.
const UNSAFE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f" +
    "\\u00ad\\u034f\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u0890\\u0891\\u08e2\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\ud800-\\udfff" +
    "\\u{110bd}\\u{110cd}\\u{13430}-\\u{1345f}\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]",
  "gu",
);

function escaped(character) {
  const code = character.codePointAt(0);
  if (code <= 0xff) return "\\x" + code.toString(16).padStart(2, "0");
  if (code <= 0xffff) return "\\u" + code.toString(16).padStart(4, "0");
  return "\\U" + code.toString(16).padStart(8, "0");
}

/** Text in pieces: [text, whether it is an escape of ours]. */
export function pieces(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(UNSAFE)) {
    if (match.index > end) found.push([text.slice(end, match.index), false]);
    found.push([escaped(match[0]), true]);
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push([text.slice(end), false]);
  return found;
}

/** Text for an attribute, where no element can mark an escape. */
export function safeText(text) {
  return String(text).replace(UNSAFE, escaped);
}

/** A number as people read it: few digits, a true minus sign; an en dash where there is none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  const size = Math.abs(value);
  if (size >= 1e3 && size < 1e6) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

/** A number with as many decimals as those above and below it; very small ones with their exponent. */
export function fixed(value, decimals) {
  if (value === null || value === undefined) return "–";
  const isTiny = value !== 0 && Math.abs(value) < 0.5 * 10 ** -decimals;
  return (isTiny ? value.toExponential(2) : value.toFixed(decimals)).replace(/-/g, "−");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 1e-3) return "< 1 ms";
  if (value < 0.1) return `${number(value * 1000, 2)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  const whole = Math.round(value);
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${number(share * 100, 3)} %`;
}

export function clock(epoch) {
  const date = new Date((epoch ?? NaN) * 1000);
  return epoch && !Number.isNaN(date.getTime()) ? date.toISOString().slice(0, 19).replace("T", " ") : "–";
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

/** The last part of `package.module:Class`. */
export function shortName(environment) {
  return String(environment).split(/[:/]/).pop();
}

/** Any value of the journal, as text: on one line where it is short. */
export function told(value) {
  if (typeof value === "string") return value;
  const line = JSON.stringify(value) ?? "";
  return line.length <= 100 ? line.replace(/(?<=[,:])(?=["\d[{tfn-])/g, " ") : JSON.stringify(value, null, 2);
}

// Addresses: every view, and what is selected in it, is in the part of the URL behind `#`.
//
//   #/episodes?where=reward < 0&sort=reward      #/episode/e1/tokens?row=0&token=17      #/step/solver/0/3

let currentRun = "";

/** The run that the address names, where several are served; else nothing. */
export function namedRun() {
  return currentRun;
}

/** The view an address names: its parts, and its parameters. */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const { run = "", ...parameters } = Object.fromEntries(new URLSearchParams(query));
  currentRun = run;
  const parts = path.split("/").map(decoded).filter(Boolean);
  return { view: parts[0] ?? "overview", parts: parts.slice(1), parameters };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function address(parts, parameters = {}) {
  const given = Object.entries({ ...parameters, run: parameters.run ?? currentRun }).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

export function episodeAddress(episode, attempt = null, tab = null, parameters = {}) {
  return address(["episode", episode, ...(tab ? [tab] : [])], { ...(attempt ? { attempt } : {}), ...parameters });
}

/** Change parameters of the address without a step in the history, and without drawing the view again. */
export function amend(parameters) {
  const route = parseRoute(location.hash);
  history.replaceState(null, "", address([route.view, ...route.parts], { ...route.parameters, ...parameters }));
}

// The page: its head, which view is shown, what goes on while a run is written.

import { append, element, replace } from "./dom.js";
import { number, plural } from "./text.js";
import { address, namedRun, parseRoute } from "./routes.js";
import { openSource, recall, remember, takeToken } from "./sources.js";
import { listed, listView } from "./list.js";
import { episodeView } from "./episode.js";
import { overviewView } from "./overview.js";
import { comparisonView, runsView } from "./runs.js";
import { forksView } from "./family.js";
import { stepsView, stepView } from "./steps.js";
import { evaluationsView } from "./evaluations.js";
import { compareView } from "./compare.js";
import { listenToKeys } from "./keys.js";

const VIEWERS = { runs: runsView, comparison: comparisonView, overview: overviewView, episodes: listView, episode: episodeView, steps: stepsView, step: stepView, evaluations: evaluationsView, forks: forksView, compare: compareView };
const NAVIGATION = [["overview", "Overview"], ["episodes", "Episodes"], ["steps", "Steps"], ["evaluations", "Evaluations"], ["forks", "Forks"], ["compare", "Compare episodes"]];
const THEME = "agentrl theme";
const PULSE_MS = 2_000;

class ViewerPage {
  #source = openSource();
  #main = document.getElementById("main");
  #drawn = 0;
  #up = null;
  #pulse = null;

  async start() {
    document.documentElement.dataset.theme = recall(THEME) ?? "";
    listenToKeys(this);
    takeToken();
    addEventListener("hashchange", () => {
      takeToken(); // the printed address may be pasted into a page that is already open
      if (!location.hash.match(/^#\w/)) this.draw();
    });
    document.addEventListener("click", (event) => this.#follow(event));
    await this.draw();
    if (this.#source.isLive) this.#watch();
  }

  ask(question, parameters) {
    return this.#source.ask(question, parameters);
  }

  go(to) {
    if (to === location.hash) this.draw();
    else location.hash = to;
  }

  up() {
    const help = document.getElementById("help");
    if (help.open) return help.close();
    const { view, parts } = parseRoute(location.hash);
    if (view === "episode" && parts.length > 1) return this.go(address(["episode", parts[0]]));
    return this.go(this.#up ?? address(["episodes"]));
  }

  search() {
    const field = document.getElementById("search");
    if (field) field.focus();
    else {
      this.go(address(["episodes"]));
      this.#focusSearch = true;
    }
  }

  #focusSearch = false;

  /** What a view goes on with after it is shown; nothing is said where the view has changed meanwhile. */
  later(promise) {
    promise.catch((error) => append(this.#main, [element("p", { class: "problem", role: "alert" }, error.message)]));
  }

  toggleTheme() {
    const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    remember(THEME, document.documentElement.dataset.theme);
  }

  /** Show what the address names; whether it was shown. A refresh leaves alone what somebody is in the middle of. */
  async draw({ isRefresh = false } = {}) {
    const number = ++this.#drawn;
    const route = parseRoute(location.hash);
    this.#main.setAttribute("aria-busy", "true");
    let view;
    try {
      if (!Object.hasOwn(VIEWERS, route.view)) throw new Error(`There is no view “${route.view}” here; there are: ${NAVIGATION.map(([view]) => view).join(", ")}.`);
      view = await VIEWERS[route.view](this, route);
      await this.#headOf(route.view);
    } catch (error) {
      const back = element("p", {}, element("a", { href: address(["episodes"]) }, "All episodes of this run"));
      view = { title: "Not shown", content: [element("p", { class: "problem", role: "alert" }, error.message), back], up: address(["episodes"]) };
      await this.#headOf(route.view).catch(() => {}); // without its head a page that shows nothing has no way on
    }
    if (number !== this.#drawn) return false;
    if (isRefresh && this.#isRead()) {
      this.#main.removeAttribute("aria-busy");
      return false;
    }
    const [scrolled, held] = [scrollY, this.#main.querySelector("tr.selected")?.dataset.to];
    replace(this.#main, view.content);
    if (isRefresh) [...this.#main.querySelectorAll("tr[data-to]")].find((row) => row.dataset.to === held)?.classList.add("selected");
    this.#main.dataset.view = route.view;
    this.#main.removeAttribute("aria-busy");
    this.#up = view.up ?? null;
    if (route.view === "episodes") listed.from = location.hash;
    this.#settle(view.title, route.view, isRefresh ? scrolled : null);
    return true;
  }

  /** Whether somebody scrolls, writes, marks, chooses or goes from link to link in what is shown. */
  #isRead() {
    const isHeld = this.#main.contains(document.activeElement) && document.activeElement.matches("a, button, input, summary");
    const isAside = [...this.#main.querySelectorAll(".scroll")].some((each) => each.scrollLeft > 0);
    return scrollY > 40 || isHeld || isAside || String(getSelection()) !== "" || this.#main.querySelector("details[open]") !== null;
  }

  #settle(title, view, scrolled) {
    document.title = `${title} · ${this.name ?? "agentrl"}`;
    for (const link of document.querySelectorAll("#top nav a")) {
      if (link.dataset.view === SECTION[view]) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    for (const link of document.querySelectorAll("nav [aria-current=page]")) link.scrollIntoView({ block: "nearest", inline: "center" });
    const place = this.#main.querySelector(".selected, .token.chosen, .token.arrived");
    if (this.#focusSearch) document.getElementById("search")?.focus();
    else (place?.closest("[tabindex]") ?? this.#main).focus({ preventScroll: true });
    if (scrolled !== null) scrollTo(0, scrolled);
    else if (place) place.scrollIntoView({ block: "center" });
    else scrollTo(0, 0);
    this.#focusSearch = false;
    document.getElementById("announcer").textContent = title;
  }

  #headed = null;

  /** The head of the page: of the run that is shown, or of the list of runs. */
  async #headOf(view) {
    const about = ALL_RUNS.has(view) ? "" : `run ${namedRun()}`;
    if (this.#headed === about) {
      const count = document.querySelector("#top .brand .quiet");
      if (about && this.#source.isLive && count) count.textContent = counted(await this.ask("run"));
      return;
    }
    if (about) await this.#head();
    else this.#bar([element("a", { class: "brand", href: "#/runs" }, element("b", {}, "agentrl"), element("span", { class: "quiet" }, "runs"))], [element("a", { href: "#/runs", "data-view": "runs" }, "Runs")]);
    this.#headed = about;
  }

  async #head() {
    const run = await this.ask("run");
    this.name = run.name;
    const links = NAVIGATION.map(([view, label]) => element("a", { href: address([view]), "data-view": view }, label));
    const runs = namedRun() ? element("a", { href: "#/runs", "data-view": "runs" }, "Runs") : null;
    this.#bar([element("a", { class: "brand", href: address(["overview"]), title: run.path }, element("b", {}, run.name), element("span", { class: "quiet" }, counted(run)))], [runs, ...links]);
  }

  #bar(brand, links) {
    replace(
      document.getElementById("top"),
      brand,
      element("nav", { "aria-label": "Views" }, links),
      element("span", { class: "live", id: "live", hidden: !this.#source.isLive }, ""),
      element("button", { type: "button", title: "dark or light  d", "aria-label": "dark or light", on: { click: () => this.toggleTheme() } }, "◐"),
      element("button", { type: "button", title: "keys  ?", "aria-label": "keys", on: { click: () => document.dispatchEvent(new KeyboardEvent("keydown", { key: "?" })) } }, "?"),
    );
  }

  /** A row that names where it leads is a link wherever it is clicked. */
  #follow(event) {
    if (event.defaultPrevented || event.target.closest("a, button, summary, input, label, pre") || String(getSelection())) return;
    const to = event.target.closest("tr[data-to], .relative[data-to]")?.dataset.to;
    if (to) this.go(to);
  }

  /** While the run is written: draw anew what has changed, once nobody is in the middle of something there. */
  async #watch() {
    const live = document.getElementById("live");
    try {
      if (ALL_RUNS.has(parseRoute(location.hash).view)) return void setTimeout(() => this.#watch(), PULSE_MS);
      const pulse = await this.ask("pulse");
      const isNew = this.#pulse && pulse.newest !== this.#pulse.newest;
      if (live) [live.textContent, live.className] = pulse.ended ? [pulse.state || "ended", "live"] : ["live", "live on"];
      const { view } = parseRoute(location.hash);
      const isDrawn = isNew && ["overview", "episodes", "steps", "evaluations"].includes(view) && !this.#isRead() && (await this.draw({ isRefresh: true }));
      if (!isNew || isDrawn) this.#pulse = pulse;
    } catch (error) {
      if (live) [live.textContent, live.className, live.title] = ["not connected", "live off", error.message];
    }
    setTimeout(() => this.#watch(), document.hidden ? 5 * PULSE_MS : PULSE_MS);
  }
}

/** How many episodes a run has. */
function counted(run) {
  return run.all > run.episodes ? `${number(run.episodes)} of ${plural(run.all, "episode")}` : `${plural(run.episodes, "episode")} in all`;
}

const ALL_RUNS = new Set(["runs", "comparison"]);
const SECTION = { runs: "runs", comparison: "runs", overview: "overview", episodes: "episodes", episode: "episodes", steps: "steps", step: "steps", evaluations: "evaluations", forks: "forks", compare: "compare" };

new ViewerPage().start();

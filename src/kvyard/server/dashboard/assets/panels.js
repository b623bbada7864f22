// Tiles and workers.
import { lately, spark } from "./charts.js";
import { byId, el, inTiers, keyed, many, number, percent, place, put, set, short, svg, time } from "./format.js";

const WINDOW = 5; // seconds over which rates are taken
const KEPT = 90; // looks remembered per worker
export const MANY = 12; // workers above which each gets less room

const TONES = { ready: "good", busy: "warn", starting: "warn", draining: "warn", stalled: "warn", suspect: "warn", down: "bad" };
const ORDER = ["down", "stalled", "suspect", "starting", "draining", "busy", "ready"];

/** What of a prompt needn't be computed, as a share; null where nothing came. */
export const reused = (prompts) => {
  const found = inTiers(prompts);
  const all = found + (prompts.elsewhere || 0) + (prompts.computed || 0);
  return all ? found / all : null;
};

// -- tiles -----------------------------------------------------------------------------------------------------------

const tile = ([name]) => el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }), el("div", { class: "more" }));
const fillTile = (node, [, value, unit, more, tone]) => {
  const [, figure, words] = node.children;
  if (figure.textContent !== value + unit) figure.replaceChildren(value, unit ? el("small", null, unit) : "");
  put(words, more);
  set(words, "title", more);
  set(node, "data-tone", tone || "");
};

export const tiles = (view, points) => {
  const { totals } = view, now = lately(points, WINDOW), minute = lately(points, 60);
  const rate = (name) => (now ? now[name] / now.dt : null);
  const running = view.workers.reduce((sum, one) => sum + one.running, 0), waiting = view.workers.reduce((sum, one) => sum + one.waiting, 0) + totals.queued;
  const share = minute ? reused(minute.prompts) : null;
  const bad = totals.failed;
  const items = [
    ["Requests", short(rate("finished")), "/s", `${short(totals.finished)} finished`],
    ["Output", short(rate("output_tokens")), "tokens/s", `${short(totals.output_tokens)} in all`],
    ["Prompts", short(rate("prompt_tokens")), "tokens/s", `${short(totals.prompt_tokens)} in all`],
    ["Reused, last minute", share === null ? "–" : percent(share), "", `${percent(reused(totals.prompts))} since the start`],
    ["Running", number(running), "", `${number(waiting)} waiting`],
  ];
  if (totals.ttft) items.push(["First token, median", time(totals.ttft.p50), "", `p99 ${time(totals.ttft.p99)}`]);
  const rest = [totals.refused && `${short(totals.refused)} refused`, totals.retried && `${short(totals.retried)} retried`, totals.cancelled && `${short(totals.cancelled)} hung up`].filter(Boolean);
  items.push(["Failed", short(bad), "", rest.join(" · ") || `of ${many(totals.requests, "request")}`, bad ? "bad" : ""]);
  keyed(byId("tiles"), items, (item) => item[0], tile, fillTile);
};

// -- workers ---------------------------------------------------------------------------------------------------------

/** Remembers what each worker has done, for rates. */
export class Past {
  constructor() { this.of = new Map(); this.since = null; }

  add(view) {
    if (this.since !== view.since) this.of.clear();
    this.since = view.since;
    const there = new Set();
    for (const worker of view.workers) {
      there.add(worker.name);
      let kept = this.of.get(worker.name);
      if (!kept) this.of.set(worker.name, (kept = []));
      kept.push({ at: view.at, output: worker.output_tokens });
      if (kept.length > KEPT) kept.shift();
    }
    for (const name of this.of.keys()) if (!there.has(name)) this.of.delete(name);
  }

  rate(name) {
    const kept = this.of.get(name) || [], last = kept[kept.length - 1];
    let first = kept.length - 1;
    while (first > 0 && last.at - kept[first - 1].at <= WINDOW + 0.5) first--;
    const dt = kept.length > 1 ? last.at - kept[first].at : 0;
    return dt > 0 ? Math.max(0, last.output - kept[first].output) / dt : null;
  }

  line(name) {
    const kept = this.of.get(name) || [];
    const found = [];
    // Three looks at a time: passes come in bursts, and what one second saw means little.
    for (let i = 3; i < kept.length; i++) found.push(Math.max(0, kept[i].output - kept[i - 3].output) / Math.max(0.1, kept[i].at - kept[i - 3].at));
    return found;
  }
}

const fact = (name, unit, extra) => el("div", { class: extra ? "extra" : null }, el("dt", null, name), el("dd", { "data-unit": unit }));
const card = () =>
  el("article", { class: "worker" },
    el("div", { class: "name" }, el("h3"), el("span", { class: "model" }), el("span", { class: "pill" }, el("span"))),
    el("p", { class: "reason" }),
    el("dl", { class: "facts" }, fact("running", " run"), fact("waiting", " wait"), fact("tokens/s", " tok/s", true), fact("reused", " reused", true)),
    el("div", { class: "tiers" }),
    svg("svg", { class: "spark", viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" }));

const tierRow = () => el("div", { class: "tier" }, el("span"), el("div", { class: "meter", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, el("i", { class: "held" }), el("i", { class: "idle" })), el("b"));
const fillTier = (node, { tier, worker, most }) => {
  const [name, meter, text] = node.children, [held, idle] = meter.children;
  // Without a capacity, bars only compare workers with each other.
  const room = tier.capacity || most.get(tier.name) || 1, used = (tier.held + tier.idle) / room;
  put(name, place(tier.name));
  held.style.width = `${(100 * tier.held) / room}%`;
  idle.style.width = `${(100 * tier.idle) / room}%`;
  const said = tier.capacity ? percent(used) : short(tier.held + tier.idle);
  put(text, said);
  set(meter, "aria-valuenow", String(Math.round(100 * used)));
  set(meter, "aria-label", `${worker.name} ${tier.name}`);
  const words = `${place(tier.name)} (${tier.name}): ${many(tier.held, "block")} held, ${number(tier.idle)} cached` + (tier.capacity ? ` of ${number(tier.capacity)}` : "");
  set(meter, "aria-valuetext", words);
  set(node, "title", words);
};

const fillCard = (past, most, small) => (node, worker) => {
  const [name, reason, facts, tiers, line] = node.children, [title, model, pill] = name.children;
  const tone = TONES[worker.state] || "warn";
  put(title, worker.name);
  set(title, "title", [worker.name, worker.url].filter(Boolean).join(" · "));
  put(model, [worker.role === "both" ? "" : worker.role, worker.model, worker.ranks > 1 ? `${worker.ranks} ranks` : ""].filter(Boolean).join(" · "));
  set(model, "title", worker.model);
  put(pill.firstChild, worker.state);
  set(pill, "data-tone", tone);
  set(node, "data-tone", tone);
  put(reason, worker.state === "ready" ? "" : worker.reason);
  reason.hidden = !reason.textContent;
  set(reason, "title", reason.textContent);
  const figures = [number(worker.running), number(worker.waiting), worker.state === "down" ? "–" : short(past.rate(worker.name)), percent(reused(worker.prompts))];
  figures.forEach((figure, i) => put(facts.children[i].lastChild, figure));
  keyed(tiers, worker.tiers.map((tier) => ({ tier, worker, most })), ({ tier }) => tier.name, tierRow, fillTier);
  if (small) return; // no room for a line
  const values = past.line(worker.name);
  line.toggleAttribute("hidden", values.length < 2 || worker.state === "down");
  if (values.length > 1) spark(line, values);
};

const use = (worker) => { const tier = worker.tiers[0]; return tier ? (tier.held + tier.idle) / (tier.capacity || tier.held + tier.idle || 1) : 0; };
const natural = new Intl.Collator("en", { numeric: true });
const SORTS = {
  given: (a, b) => natural.compare(a.name, b.name),
  load: (a, b) => b.running + b.waiting - a.running - a.waiting || SORTS.given(a, b),
  cache: (a, b) => use(b) - use(a) || SORTS.given(a, b),
  state: (a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || SORTS.given(a, b),
};

export const workers = (view, past, sort) => {
  const box = byId("workers"), counts = new Map();
  for (const worker of view.workers) counts.set(worker.state, (counts.get(worker.state) || 0) + 1);
  const roles = ["prefill", "decode"].map((role) => [view.workers.filter((worker) => worker.role === role).length, role]).filter(([count]) => count);
  const states = ORDER.filter((state) => counts.has(state)).reverse().map((state) => [counts.get(state), state]);
  put(byId("workers-sum"), [states, roles].filter((said) => said.length).map((said) => said.map((one) => one.join(" ")).join(", ")).join("; ") || "there are none");
  const most = new Map();
  for (const { tiers } of view.workers) for (const tier of tiers) most.set(tier.name, Math.max(most.get(tier.name) || 0, tier.held + tier.idle));
  byId("tier-legend").classList.toggle("bare", !view.workers.some(({ tiers }) => tiers.some((tier) => tier.capacity)));
  byId("tier-legend").hidden = view.workers.every((worker) => worker.tiers.length === 0);
  box.classList.toggle("many", view.workers.length > MANY);
  keyed(box, [...view.workers].sort(SORTS[sort] || SORTS.given), (worker) => worker.name, card, fillCard(past, most, view.workers.length > MANY));
};

// Decisions, streams of events, and transfers.
import { byId, bytes, clock, el, inTiers, keyed, many, number, percent, place, put, set, short, span, time } from "./format.js";
import { TIERS } from "./tiers.js";

const MOST = 50; // decisions shown

const cell = (kind) => el("td", kind ? { class: kind } : null);
const clip = (td, text) => {
  if (!td.firstChild) td.append(el("span", { class: "clip" }));
  put(td.firstChild, text);
  set(td.firstChild, "title", text);
};

// -- decisions -------------------------------------------------------------------------------------------------------

const blocksFound = (one) => Object.values(one.tiers).reduce((sum, blocks) => sum + blocks, 0);

/** The list of decisions: grows by what is new, and remembers which ones are open. */
export class Decisions {
  constructor() { this.list = []; this.open = new Set(); this.body = byId("decisions"); this.first = true; }

  clear() {
    this.list = [];
    this.open.clear();
    this.first = true;
    this.body.replaceChildren();
    this.body.kept = null; // another server counts its decisions from one again
  }

  add(fresh) {
    const had = new Set(this.list.map((one) => one.number));
    this.list = [...fresh.filter((one) => !had.has(one.number)), ...this.list].sort((a, b) => b.number - a.number).slice(0, MOST);
  }

  draw() {
    const rows = [];
    for (const one of this.list) {
      rows.push({ key: `${one.number}`, one, said: false });
      if (this.open.has(one.number)) rows.push({ key: `${one.number} said`, one, said: true });
    }
    keyed(this.body, rows, (row) => row.key, (row) => (row.said ? this.words() : this.row(row.one)), (node, row) => {
      if (row.said) put(node.firstChild, row.one.said || "Nothing more was said about it.");
      else set(node.querySelector("button"), "aria-expanded", String(this.open.has(row.one.number)));
    });
    this.first = false;
    // A mock chooses no worker: it has neither costs nor others to compare with.
    this.body.parentNode.classList.toggle("plain", this.list.every((one) => one.cost === null && one.best === null));
    byId("decisions-none").hidden = this.list.length > 0;
    this.body.parentNode.hidden = this.list.length === 0;
    const looked = this.list.filter((one) => one.best !== null);
    const lost = looked.filter((one) => one.best > blocksFound(one)).length;
    put(byId("decisions-sum"), this.list.length ? `the last ${this.list.length}` + (looked.length ? `; ${lost} passed over a longer prefix` : "") : "");
  }

  words() { return el("tr", { class: "said" }, el("td", { colspan: 9 })); }

  row(one) {
    const found = blocksFound(one), all = one.blocks || 1;
    const meter = el("div", { class: "meter" });
    for (const { label: name, color } of TIERS) {
      if (!one.tiers[name]) continue;
      const part = el("i", { class: color });
      part.style.width = `${Math.min(100, (100 * one.tiers[name]) / all)}%`;
      meter.append(part);
    }
    const where = TIERS.filter(({ label }) => one.tiers[label]).map(({ label }) => `${number(one.tiers[label])} ${label}`).join(", ") || "nothing";
    const best = one.best === null ? "–" : one.best > found ? `${one.best_worker || "another"} has ${number(one.best - found)} more` : "no worker has more";
    const button = el("button", { type: "button", "aria-expanded": "false", "aria-label": `Explain ${one.id}` }, "why");
    button.addEventListener("click", () => {
      if (!this.open.delete(one.number)) this.open.add(one.number);
      this.draw();
    });
    const cells = [cell("dim"), cell("words mono extra"), cell("words"), cell("words dim"), cell(), cell("words"), cell("extra choice"), cell("words dim extra choice"), cell()];
    put(cells[0], clock(one.at));
    clip(cells[1], one.id);
    clip(cells[2], one.worker);
    clip(cells[3], one.why);
    put(cells[4], number(one.tokens));
    cells[5].append(el("div", { class: "found", title: `${where} of ${many(one.blocks, "block")}` }, meter, el("span", null, percent(one.blocks ? found / all : 0))));
    put(cells[6], one.cost === null ? "–" : number(one.cost));
    clip(cells[7], best);
    cells[8].append(button);
    const row = el("tr", { class: this.first ? null : "new" }, ...cells);
    row.addEventListener("animationend", () => row.classList.remove("new"), { once: true });
    return row;
  }
}

// -- promises --------------------------------------------------------------------------------------------------------

/** What a router took workers to have, and what they found. The first row is of all of them together. */
export const promises = (view) => {
  const all = view.totals.promises, part = byId("promises-part");
  part.hidden = !all;
  if (!all) return;
  const { prompts } = view.totals, known = inTiers(prompts);
  put(byId("promises-sum"), `since the start: some worker had ${short(known + (prompts.elsewhere || 0))} tokens of prompts, the chosen one ${short(known)}; of ${short(all.promised)} that are settled, ${short(all.delivered)} were found`);
  const rows = [{ name: "all workers", promises: all, sum: true }, ...view.workers.filter((one) => one.promises)];
  keyed(byId("promises"), rows, (one) => (one.sum ? " all" : one.name), (one) => el("tr", { class: one.sum ? "sum" : null }, cell("words"), cell(), el("td", { class: "words" }, el("div", { class: "found" }, el("div", { class: "meter" }, el("i", { class: "blue" })), el("span"))), cell(), cell("words")), (row, one) => {
    const [name, promised, delivered, beyond, why] = row.children, { missing } = one.promises;
    const share = one.promises.promised ? one.promises.delivered / one.promises.promised : null;
    clip(name, one.name);
    put(promised, number(one.promises.promised));
    delivered.firstChild.firstChild.firstChild.style.width = `${100 * (share || 0)}%`;
    put(delivered.firstChild.lastChild, share === null ? "–" : `${percent(share)} · ${number(one.promises.delivered)}`);
    put(beyond, number(one.promises.unpromised));
    const reasons = Object.entries(missing).sort((a, b) => b[1] - a[1]);
    put(why, reasons.map(([reason, tokens]) => `${number(tokens)} ${reason}`).join(" · ") || "–");
    set(why, "title", reasons.map(([reason]) => `${reason}: ${view.reasons[reason] || ""}`).join("\n"));
  });
};

// -- hits owed -------------------------------------------------------------------------------------------------------

/** What engines owe the latest requests, what they counted, and the cause of a difference. */
export const owed = (view) => {
  const found = view.expectation;
  byId("owed-part").hidden = !found;
  if (!found) return;
  put(byId("owed-sum"), `the latest ${many(found.requests, "request")}, ${span(Math.max(0, view.at - found.at))} ago; ${number(found.exact)} counted to the token`);
  const rows = [["owed", found.owed, "blue"], ["counted", found.counted, "aqua"]];
  keyed(byId("owed").firstChild, rows, (row) => row[0], () => el("div", null, el("dt"), el("dd", { class: "found" }, el("div", { class: "meter" }, el("i")), el("span"))), (node, [name, tokens, color]) => {
    const [title, { firstChild: meter, lastChild: text }] = node.children, share = found.prompt_tokens ? tokens / found.prompt_tokens : 0;
    put(title, name);
    set(meter.firstChild, "class", color);
    meter.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
    put(text, `${percent(share)} of prompt tokens · ${short(tokens)}`);
  });
  set(byId("owed"), "data-tone", found.fault ? "bad" : found.cause ? "warn" : "good");
  put(byId("owed-sentence"), found.sentence || "Engines count what they owe.");
};

// -- sessions and tenants --------------------------------------------------------------------------------------------

const meterCell = () => el("td", { class: "words" }, el("div", { class: "found" }, el("div", { class: "meter" }, el("i", { class: "aqua" })), el("span")));
const fillMeter = (td, part, all) => {
  const share = all ? part / all : null;
  td.firstChild.firstChild.firstChild.style.width = `${Math.min(100, 100 * (share || 0))}%`;
  put(td.firstChild.lastChild, share === null ? "–" : percent(share));
  set(td, "title", `${number(part)} of ${number(all)} prompt tokens`);
};

/** Who asked for what; hidden where no request named a tenant. */
export const tenants = (view) => {
  byId("tenants-part").hidden = !view.tenants.length;
  put(byId("tenants-sum"), many(view.tenants.length, "tenant"));
  keyed(byId("tenants"), view.tenants, (one) => one.name, () => el("tr", null, cell("words"), cell(), cell(), cell(), meterCell(), cell(), cell(), cell()), (row, one) => {
    const [name, requests, failed, prompt, cached, output, waited, engine] = row.children;
    clip(name, one.name);
    put(requests, number(one.requests));
    put(failed, number(one.failed));
    put(prompt, short(one.prompt_tokens));
    fillMeter(cached, one.cached_tokens, one.prompt_tokens);
    put(output, short(one.output_tokens));
    put(waited, time(one.waited_ms));
    put(engine, span(one.engine_s));
  });
};

/** The latest sessions; hidden where there are none. */
export const sessions = (view) => {
  byId("sessions-part").hidden = !view.sessions.length;
  put(byId("sessions-sum"), `the latest ${view.sessions.length} of ${many(view.session_count, "session")} remembered`);
  keyed(byId("sessions"), view.sessions, (one) => `${one.tenant} ${one.name}`, () => el("tr", null, cell("words"), cell("words"), cell(), cell("words"), cell(), cell(), meterCell(), cell(), cell(), cell(), cell()), (row, one) => {
    const [name, tenant, turns, worker, moves, prompt, cached, output, waited, lasted, ended] = row.children;
    clip(name, one.name);
    clip(tenant, one.tenant || "–");
    put(turns, number(one.turns));
    clip(worker, one.worker || "–");
    put(moves, number(one.moves));
    put(prompt, short(one.prompt_tokens));
    fillMeter(cached, one.cached_tokens, one.prompt_tokens);
    put(output, short(one.output_tokens));
    put(waited, time(one.waited_ms));
    put(lasted, span(one.lasted_s));
    put(ended, one.age_s < 1 ? "now" : `${span(one.age_s)} ago`);
  });
};

// -- streams ---------------------------------------------------------------------------------------------------------

const TONES = { fresh: "good", sending: "good", "catching up": "warn", stale: "bad", failed: "bad" };
const WORST = ["failed", "stale", "catching up", "fresh", "sending"];

/** Rates of counters between two looks a few seconds apart. */
export class Rates {
  constructor() { this.looks = []; }

  add(at, values) {
    if (this.looks.length && at < this.looks[this.looks.length - 1].at) this.looks = [];
    this.looks.push({ at, values });
    while (this.looks.length > 2 && at - this.looks[1].at >= 5) this.looks.shift();
  }

  of(key) {
    const a = this.looks[0], b = this.looks[this.looks.length - 1];
    if (!a || b.at <= a.at || !a.values.has(key) || !b.values.has(key)) return null;
    return Math.max(0, b.values.get(key) - a.values.get(key)) / (b.at - a.at);
  }
}

export const streams = (view, rates) => {
  rates.add(view.at, new Map(view.streams.map((one) => [one.name, one.batches])));
  const counts = new Map();
  for (const one of view.streams) counts.set(one.state, (counts.get(one.state) || 0) + 1);
  put(byId("streams-sum"), WORST.filter((state) => counts.has(state)).map((state) => `${counts.get(state)} ${state}`).join(", "));
  byId("streams-none").hidden = view.streams.length > 0;
  byId("streams").parentNode.hidden = view.streams.length === 0;
  // Most workers have one stream, and then its worker is its name.
  const per = new Map();
  for (const one of view.streams) per.set(one.worker, (per.get(one.worker) || 0) + 1);
  const sorted = view.streams.map((one, i) => [one, i]).sort(([a, i], [b, k]) => WORST.indexOf(a.state) - WORST.indexOf(b.state) || i - k).map(([one]) => one);
  keyed(byId("streams"), sorted, (one) => one.name, () => el("tr", null, cell("words"), el("td", { class: "words" }, el("span", { class: "pill" })), ...Array.from({ length: 8 }, () => cell())), (row, one) => {
    const [name, state, ...rest] = row.children;
    clip(name, one.worker && per.get(one.worker) === 1 ? one.worker : one.name);
    set(name.firstChild, "title", [one.name, one.endpoint].filter(Boolean).join(" · "));
    put(state.firstChild, one.state);
    set(state.firstChild, "data-tone", TONES[one.state] || "warn");
    set(state, "title", one.reason);
    const figures = [one.seq < 0 ? "–" : number(one.seq), short(rates.of(one.name)), one.lag_ms === null ? "–" : time(one.lag_ms), number(one.waiting), number(one.gaps), number(one.missed), number(one.restarts), one.age_s === null ? "–" : one.age_s < 1 ? "now" : `${span(one.age_s)} ago`];
    figures.forEach((figure, i) => put(rest[i], figure));
  });
};

// -- transfers -------------------------------------------------------------------------------------------------------

/** Few links are shown one by one, many by direction. */
const links = (transfers) => {
  if (transfers.length <= 12) return transfers.map((one) => ({ ...one, name: `${one.worker} ${place(one.source)} → ${place(one.target)}` }));
  const found = new Map();
  for (const one of transfers) {
    const name = `${place(one.source)} → ${place(one.target)}`, sum = found.get(name);
    if (!sum) { found.set(name, { ...one, name: `${name}, all workers` }); continue; }
    for (const key of ["under_way", "landed", "blocks", "bytes", "queued_ms"]) sum[key] += one[key];
    sum.bandwidth = sum.bandwidth === null || one.bandwidth === null ? null : sum.bandwidth + one.bandwidth;
  }
  return [...found.values()];
};

export const transfers = (view, rates) => {
  const all = links(view.transfers);
  rates.add(view.at, new Map(all.map((one) => [one.name, one.bytes])));
  // Where no tier is known below the device, there is nothing to say.
  byId("transfers-part").hidden = all.length === 0;
  byId("pair").classList.toggle("one", all.length === 0);
  put(byId("transfers-sum"), all.length ? `${many(view.transfers.reduce((sum, one) => sum + one.under_way, 0), "copy", "copies")} in flight` : "");
  keyed(byId("transfers"), all, (one) => one.name, () => el("tr", null, cell("words"), el("td", { class: "words" }, el("div", { class: "found" }, el("div", { class: "meter" }, el("i", { class: "blue" })), el("span"))), ...Array.from({ length: 4 }, () => cell())), (row, one) => {
    const [name, speed, ...rest] = row.children, rate = rates.of(one.name), found = speed.firstChild;
    clip(name, one.name);
    found.firstChild.hidden = one.bandwidth === null;
    if (one.bandwidth) found.firstChild.firstChild.style.width = `${Math.min(100, (100 * (rate || 0)) / one.bandwidth)}%`;
    put(found.lastChild, rate === null ? "–" : `${bytes(rate)}/s`);
    set(found, "title", one.bandwidth ? `of ${bytes(one.bandwidth)}/s` : "no limit is known");
    const figures = [number(one.under_way), number(one.landed), bytes(one.bytes), time(one.landed ? one.queued_ms / one.landed : 0)];
    figures.forEach((figure, i) => put(rest[i], figure));
  });
};

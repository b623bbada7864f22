// The page: takes what the server sends and hands it to the panels.
import { binned, Chart, SPAN } from "./charts.js";
import { byId, clock, el, many, number, percent, put, set, short, span, time } from "./format.js";
import { Past, tiles, workers } from "./panels.js";
import { Stream } from "./stream.js";
import { Decisions, owed, promises, Rates, sessions, streams, tenants, transfers } from "./tables.js";
import { TIERS } from "./tiers.js";

const SOURCES = [
  ...TIERS.map(({ label, place, color }) => [label, label === "device" ? "found on the device" : `loaded from ${place}`, color]),
  ["elsewhere", "computed, though another worker had it", "yellow"], ["computed", "computed", "grey"],
];

const charts = (() => {
  const rate = (name) => (bin) => (bin.sums[name] || 0) / bin.dt;
  const gauge = (name) => (bin) => (bin.gauges[name] || 0) / bin.n;
  const ttft = (name) => (bin) => (bin.ttft ? bin.ttft[name] : null);
  const sources = new Chart("chart-sources", {
    label: "Where prompt tokens came from", stacked: true, legend: "source-legend", height: 196, format: percent,
    series: SOURCES.map(([key, name, color]) => ({ key, name, color, of: null, rare: !["device", "computed"].includes(key) })),
  });
  sources.as = (share) => {
    sources.high = share ? 1 : null;
    sources.format = share ? percent : (value) => `${short(value)}/s`;
    sources.tick = share ? percent : short;
    for (const one of sources.series) {
      one.of = share
        ? (bin) => { const all = SOURCES.reduce((sum, [key]) => sum + (bin.sums[key] || 0), 0); return all ? (bin.sums[one.key] || 0) / all : null; }
        : rate(one.key);
    }
  };
  sources.as(true);
  return [
    sources,
    new Chart("chart-load", { label: "Requests in flight", legend: "load-legend", height: 196, format: number, tick: short, series: [
      { name: "running", color: "blue", of: gauge("running") }, { name: "waiting", color: "yellow", of: gauge("waiting") }, { name: "queued here", color: "red", of: gauge("queued"), rare: true }] }),
    new Chart("chart-output", { label: "Output tokens per second", height: 189, format: (v) => `${short(v)}/s`, tick: short, series: [{ name: "output tokens", color: "blue", of: rate("output_tokens") }] }),
    new Chart("chart-requests", { label: "Requests per second", legend: "requests-legend", format: (v) => `${number(v)}/s`, tick: number, series: [
      { name: "finished", color: "blue", of: rate("finished") }, { name: "failed", color: "red", of: rate("failed"), rare: true }] }),
    new Chart("chart-ttft", { label: "Time to first token", legend: "ttft-legend", format: time, tick: time, series: [
      { name: "p50", color: "blue", of: ttft("p50") }, { name: "p90", color: "aqua", of: ttft("p90") }, { name: "p99", color: "violet", of: ttft("p99") }] }),
  ];
})();

const page = { view: null, points: [], past: new Past(), decisions: new Decisions(), streams: new Rates(), transfers: new Rates(), held: false, trouble: "" };

// -- drawing ---------------------------------------------------------------------------------------------------------

const KINDS = { mock: "mock fleet", gateway: "gateway" };
const draw = () => {
  const { view } = page;
  if (!view || document.hidden) return;
  document.body.classList.remove("empty");
  put(byId("kind"), KINDS[view.kind] || view.kind);
  document.title = `kvyard ${KINDS[view.kind] || view.kind}`;
  put(byId("about"), [many(view.workers.length, "worker"), view.policy && `policy ${view.policy}`, view.speed !== 1 && `time × ${number(view.speed)}: latencies nominal, rates real`, view.version, `up ${span(view.at - view.since)}`].filter(Boolean).join(" · "));
  const notes = page.trouble ? [page.trouble, ...view.notes] : view.notes;
  if (byId("notes").said !== notes.join("\n")) {
    byId("notes").replaceChildren(...notes.map((note) => el("li", null, note)));
    byId("notes").said = notes.join("\n");
  }
  tiles(view, page.points);
  const sums = binned(page.points);
  for (const chart of charts) chart.draw(sums, view.at);
  workers(view, page.past, byId("workers-sort").value);
  page.decisions.draw();
  put(byId("decisions-title"), view.kind === "mock" ? "Recent admissions" : "Recent decisions");
  promises(view);
  owed(view);
  tenants(view);
  sessions(view);
  streams(view, page.streams);
  transfers(view, page.transfers);
};

const pointOf = (view) => ({
  at: view.at, since: view.since, prompts: view.totals.prompts, ttft: view.totals.ttft, queued: view.totals.queued,
  running: view.workers.reduce((sum, one) => sum + one.running, 0), waiting: view.workers.reduce((sum, one) => sum + one.waiting, 0),
  requests: view.totals.requests, finished: view.totals.finished, failed: view.totals.failed, prompt_tokens: view.totals.prompt_tokens, output_tokens: view.totals.output_tokens,
});

const heard = (event, value) => {
  if (event === "history") {
    // What the server remembers fills in what was missed; where it goes less far back, ours is kept.
    page.points = [...page.points.filter((one) => !value.length || one.at < value[0].at), ...value];
  } else if (event === "view") {
    if (page.view && page.view.since !== value.since) page.decisions.clear();
    page.trouble = "";
    const last = page.points[page.points.length - 1];
    if (!last || value.at > last.at) page.points.push(pointOf(value));
    while (page.points.length && page.points[0].at < value.at - SPAN - 10) page.points.shift();
    page.past.add(value);
    page.decisions.add(value.decisions);
    page.view = value;
    if (!page.held) draw();
  } else if (event === "trouble") {
    page.trouble = value.error;
    draw();
  }
};

// -- the connection --------------------------------------------------------------------------------------------------

const status = { state: "connecting", until: 0, why: "" };
const saved = (where, name, value) => {
  // Storage may be forbidden; then nothing is remembered, and that is all.
  try {
    const box = window[where];
    if (value === undefined) return box.getItem(name);
    if (value === null) box.removeItem(name);
    else box.setItem(name, value);
  } catch { /* forbidden */ }
  return null;
};
const showStatus = () => {
  const node = byId("status"), live = status.state === "live", old = page.view ? ` · as of ${clock(page.view.at)}` : "";
  set(node, "data-state", live ? (page.held ? "wait" : "live") : status.state === "waiting" ? "lost" : "wait");
  put(byId("status-text"), live ? (page.held ? "Paused" : "Live") : status.state === "waiting" ? `Reconnecting: ${status.why}` : status.state === "token" ? "Token needed" : "Connecting");
  const left = Math.max(0, Math.ceil((status.until - Date.now()) / 1000));
  put(byId("status-more"), status.state === "waiting" ? `in ${left} s${old}` : live && page.held ? old.slice(3) : "");
  byId("again").hidden = status.state !== "waiting";
  byId("gate").hidden = status.state !== "token";
  document.body.classList.toggle("old", !live && page.view !== null);
};

const stream = new Stream("dashboard/events", {
  heard,
  state: (name, more) => {
    if (name === "live" && status.state === "live") return;
    status.state = name;
    if (name === "waiting") Object.assign(status, more);
    if (name === "live" && stream.token) saved("sessionStorage", "kvyard-token", stream.token);
    if (name === "token") {
      saved("sessionStorage", "kvyard-token", null);
      if (more) byId("gate-why").replaceChildren(el("span", { class: "wrong" }, more));
      showStatus();
      byId("token").focus();
    }
    showStatus();
  },
});

// A token may come behind the #, which a browser keeps to itself.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) history.replaceState(null, "", location.pathname + location.search);
stream.token = given || saved("sessionStorage", "kvyard-token");

byId("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  stream.token = byId("token").value.trim();
  byId("token").value = "";
  stream.start();
});
byId("again").addEventListener("click", () => stream.start());
byId("hold").addEventListener("click", () => {
  page.held = !page.held;
  set(byId("hold"), "aria-pressed", String(page.held));
  showStatus();
  if (!page.held) draw();
});
byId("workers-sort").addEventListener("change", draw);
for (const [id, share] of [["as-share", true], ["as-rate", false]]) {
  byId(id).addEventListener("click", () => {
    charts[0].as(share);
    set(byId("as-share"), "aria-pressed", String(share));
    set(byId("as-rate"), "aria-pressed", String(!share));
    draw();
  });
}

const THEMES = ["auto", "light", "dark"];
const theme = (name) => {
  document.documentElement.dataset.theme = name;
  put(byId("theme"), `Theme: ${name}`);
};
let chosen = THEMES.includes(saved("localStorage", "kvyard-theme")) ? saved("localStorage", "kvyard-theme") : "auto";
theme(chosen);
byId("theme").addEventListener("click", () => {
  chosen = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  saved("localStorage", "kvyard-theme", chosen);
  theme(chosen);
});

document.addEventListener("visibilitychange", draw);
let resized = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(draw); });
setInterval(() => { if (status.state === "waiting") showStatus(); }, 500);
showStatus();
stream.start();

// Charts of the last five minutes, and the sums behind them: counters in, rates by bins out.
import { byId, el, svg } from "./format.js";
import { niceTicks, placeTip } from "./scales.js";

export const SPAN = 300; // seconds shown, once so much is known
const WIDTHS = [[60, 2], [120, 3], [SPAN, 5]]; // spans, and the seconds that a bin has in them
const GAP = 4; // seconds between two looks after which nothing is known of the time between

const near = (value) => Math.round(value * 10) / 10;

/** What happened between two looks, added up by bins of a few seconds that stay where they are while time goes on. */
export const binned = (points) => {
  const known = points.length ? points[points.length - 1].at - points[0].at : 0;
  const [span, width] = WIDTHS.find(([seconds]) => known <= seconds) || WIDTHS[WIDTHS.length - 1];
  const found = new Map();
  for (let i = 1; i < points.length; i++) {
    const a = points[i - 1], b = points[i], dt = b.at - a.at;
    if (dt <= 0 || dt > GAP || a.since !== b.since) continue;
    const key = Math.floor(b.at / width);
    let bin = found.get(key);
    if (!bin) found.set(key, (bin = { at: (key + 0.5) * width, dt: 0, n: 0, sums: {}, gauges: {}, ttft: null }));
    bin.dt += dt;
    bin.n += 1;
    const add = (name, now, before) => { bin.sums[name] = (bin.sums[name] || 0) + Math.max(0, now - before); };
    for (const name of ["requests", "finished", "failed", "prompt_tokens", "output_tokens"]) add(name, b[name], a[name]);
    for (const name of Object.keys(b.prompts)) add(name, b.prompts[name], a.prompts[name]);
    for (const name of ["running", "waiting", "queued"]) bin.gauges[name] = (bin.gauges[name] || 0) + b[name];
    if (b.ttft) bin.ttft = b.ttft;
  }
  const all = [...found.values()].sort((a, b) => a.at - b.at);
  // The newest bin has hardly begun: too little to make a rate of.
  if (all.length > 1 && all[all.length - 1].dt < Math.min(2, width - 0.5)) all.pop();
  return { bins: all, span, width };
};

/** Rates over the last `seconds`, by the same rules. Null where nothing is known. */
export const lately = (points, seconds) => {
  const last = points[points.length - 1];
  const sums = { dt: 0, requests: 0, finished: 0, failed: 0, prompt_tokens: 0, output_tokens: 0, prompts: {} };
  for (let i = points.length - 1; i > 0 && last.at - points[i - 1].at <= seconds + 0.5; i--) {
    const a = points[i - 1], b = points[i], dt = b.at - a.at;
    if (dt <= 0 || dt > GAP || a.since !== b.since) break;
    sums.dt += dt;
    for (const name of ["requests", "finished", "failed", "prompt_tokens", "output_tokens"]) sums[name] += Math.max(0, b[name] - a[name]);
    for (const name of Object.keys(b.prompts)) sums.prompts[name] = (sums.prompts[name] || 0) + Math.max(0, b.prompts[name] - a.prompts[name]);
  }
  return sums.dt > 0 ? sums : null;
};

const tip = byId("tip");
const showTip = (event, rows) => {
  tip.replaceChildren(...rows);
  tip.hidden = false;
  placeTip(tip, event);
};

/** One chart. `series` are { name, color, of: bin → value or null }; `stacked` ones are drawn as bars. */
export class Chart {
  constructor(id, { label, series, format, tick, stacked = false, height = 170, legend = null }) {
    Object.assign(this, { box: byId(id), label, series, format, tick: tick || format, stacked, height });
    this.high = null;
    this.over = null;
    this.keys = series.map((one) => el("span", { hidden: one.rare }, el("i", { class: one.color }), one.name));
    if (legend) byId(legend).replaceChildren(...this.keys);
    this.box.addEventListener("pointermove", (event) => this.hover(event));
    this.box.addEventListener("pointerleave", () => this.leave());
  }

  draw({ bins, span, width: thick }, now) {
    const width = Math.max(240, this.box.clientWidth), { height } = this;
    const left = 46, right = 8, top = 8, bottom = 22;
    const from = now - span;
    const shown = bins.filter((bin) => bin.at >= from);
    const values = shown.map((bin) => this.series.map((one) => one.of(bin)));
    const known = values.some((row) => row.some((value) => value !== null));
    this.series.forEach((one, s) => { if (one.rare && values.some((row) => row[s])) this.keys[s].hidden = false; });
    let high = this.high || 0;
    if (!this.high) for (const row of values) high = Math.max(high, this.stacked ? row.reduce((a, v) => a + (v || 0), 0) : Math.max(...row.map((v) => v || 0)));
    high = high * (this.high ? 1 : 1.08) || 1;
    const x = (at) => left + ((at - from) / span) * (width - left - right);
    const y = (value) => height - bottom - (value / high) * (height - top - bottom);
    const art = [];
    for (const at of niceTicks(0, high, 4)) {
      art.push(svg("line", { class: "gridline", x1: left, x2: width - right, y1: near(y(at)), y2: near(y(at)) }));
      art.push(svg("text", { x: left - 6, y: near(y(at)) + 4, "text-anchor": "end" }, this.tick(at)));
    }
    const step = span / (span === SPAN ? 5 : 4) * (width < 480 && span === SPAN ? 2 : 1);
    for (let ago = 0; ago < span + 1; ago += step) {
      const words = ago === 0 ? "now" : span === SPAN ? `−${ago / 60} min` : `−${ago} s`;
      art.push(svg("text", { x: near(x(now - ago)), y: height - 6, "text-anchor": ago === 0 ? "end" : ago === span ? "start" : "middle" }, words));
    }
    if (this.stacked) art.push(...this.bars(shown, values, x, y, thick, left, width - right));
    else art.push(...this.lines(shown, values, x, y, thick));
    art.push(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    this.cross = svg("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    art.push(this.cross);
    if (!known) art.push(svg("text", { x: (left + width) / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
    const last = values[values.length - 1];
    const said = last ? this.series.map((one, i) => `${one.name} ${this.format(last[i])}`).join(", ") : "nothing yet";
    this.box.replaceChildren(svg("svg", { role: "img", "aria-label": `${this.label}, now: ${said}`, viewBox: `0 0 ${width} ${height}`, height }, ...art));
    Object.assign(this, { shown, values, x, now, width });
    if (this.over) this.hover(this.over);
  }

  bars(shown, values, x, y, seconds, left, right) {
    const art = [], thick = Math.max(1.5, x(seconds) - x(0) - 1);
    shown.forEach((bin, i) => {
      let base = 0;
      const a = Math.max(x(bin.at) - thick / 2, left), b = Math.min(x(bin.at) + thick / 2, right);
      values[i].forEach((value, s) => {
        if (!value) return;
        const low = y(base), up = y(base + value);
        art.push(svg("rect", { class: this.series[s].color, x: near(a), width: Math.max(0.5, near(b - a)), y: near(up), height: Math.max(0.2, near(low - up)) }));
        base += value;
      });
    });
    return art;
  }

  lines(shown, values, x, y, seconds) {
    const art = [];
    this.series.forEach((one, s) => {
      if (one.rare && this.keys[s].hidden) return;
      let run = [];
      const end = () => {
        if (!run.length) return;
        if (run.length === 1) run.push([run[0][0] + 2, run[0][1]]);
        const path = run.map(([px, py]) => `${near(px)} ${near(py)}`).join("L");
        if (s === 0) art.unshift(svg("path", { class: `under ${one.color}`, d: `M${path}L${near(run[run.length - 1][0])} ${near(y(0))}L${near(run[0][0])} ${near(y(0))}Z` }));
        art.push(svg("path", { class: `line ${one.color}`, d: `M${path}` }));
        run = [];
      };
      shown.forEach((bin, i) => {
        if (values[i][s] === null || (i && bin.at - shown[i - 1].at > seconds * 1.5)) end();
        if (values[i][s] !== null) run.push([x(bin.at), y(values[i][s])]);
      });
      end();
    });
    return art;
  }

  hover(event) {
    this.over = { clientX: event.clientX, clientY: event.clientY };
    if (!this.shown || !this.shown.length) return;
    const rect = this.box.getBoundingClientRect(), at = ((event.clientX - rect.left) * this.width) / rect.width;
    let i = 0;
    this.shown.forEach((bin, k) => { if (Math.abs(this.x(bin.at) - at) < Math.abs(this.x(this.shown[i].at) - at)) i = k; });
    const bin = this.shown[i], ago = Math.max(0, Math.round(this.now - bin.at));
    this.cross.setAttribute("x1", near(this.x(bin.at)));
    this.cross.setAttribute("x2", near(this.x(bin.at)));
    this.cross.setAttribute("visibility", "visible");
    const rows = this.series.map((one, s) => el("p", null, el("i", { class: one.color }), one.name, el("b", null, this.format(this.values[i][s]))));
    showTip(this.over, [el("p", { class: "when" }, `${ago} s ago`), ...(this.stacked ? rows.reverse() : rows)]);
  }

  leave() {
    this.over = null;
    tip.hidden = true;
    if (this.cross) this.cross.setAttribute("visibility", "hidden");
  }
}

/** A small line without axes. */
export const spark = (node, values) => {
  const high = Math.max(...values, 1e-9), step = 100 / Math.max(1, values.length - 1);
  const path = values.map((value, i) => `${near(i * step)} ${near(25 - (value / high) * 23)}`).join("L");
  node.replaceChildren(svg("path", { class: "under blue", d: `M0 26L${path}L100 26Z` }), svg("path", { class: "line blue", d: `M${path}`, "vector-effect": "non-scaling-stroke" }));
};

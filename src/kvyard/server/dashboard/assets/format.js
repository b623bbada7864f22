// Numbers as people read them, and elements made of text only: nothing that comes from the server is ever markup.
import { TIERS } from "./tiers.js";

const SVG = "http://www.w3.org/2000/svg";

const fill = (node, attributes, kids) => {
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  node.append(...kids.filter((kid) => kid !== null && kid !== undefined)); // strings become text nodes
  return node;
};
export const el = (tag, attributes, ...kids) => fill(document.createElement(tag), attributes, kids);
export const svg = (tag, attributes, ...kids) => fill(document.createElementNS(SVG, tag), attributes, kids);
export const byId = (id) => document.getElementById(id);

/** Sets a text where it differs, so that readers and selections are left alone. */
export const put = (node, text) => {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
};
export const set = (node, name, value) => {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
};

/** Makes the children of `box` those of `items`, keeping a node per key. */
export const keyed = (box, items, keyOf, make, update) => {
  const had = box.kept || (box.kept = new Map());
  const now = new Map();
  let at = box.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (now.has(key)) continue;
    const node = had.get(key) || make(item);
    now.set(key, node);
    update(node, item);
    if (node === at) at = at.nextSibling;
    else box.insertBefore(node, at);
  }
  for (const [key, node] of had) if (!now.has(key)) node.remove();
  box.kept = now;
};

/** What a tier is, by the name that engines and events have for it. */
const LABELS = new Map(TIERS.map(({ name, label }) => [name, label]));
export const place = (tier) => LABELS.get(tier) || tier;
/** Prompt tokens that tiers had. */
export const inTiers = (prompts) => TIERS.reduce((sum, { label }) => sum + (prompts[label] || 0), 0);

// -- numbers ---------------------------------------------------------------------------------------------------------

const fixed = (value, most) => value.toLocaleString("en-US", { maximumFractionDigits: most });
export const number = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  return fixed(value, value === Math.round(value) || size >= 100 ? 0 : size >= 10 ? 1 : 2);
};
export const short = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return fixed(value / 1e9, 1) + "G";
  if (size >= 1e6) return fixed(value / 1e6, 1) + "M";
  if (size >= 1e4) return fixed(value / 1e3, size >= 1e5 ? 0 : 1) + "k";
  return number(value);
};
export const percent = (value) => (value === null || value === undefined || !Number.isFinite(value) ? "–" : fixed(value * 100, value < 0.0995 && value > 0 ? 1 : 0) + " %");
export const time = (ms) => {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  return ms >= 10000 ? fixed(ms / 1000, 1) + " s" : ms >= 100 ? fixed(ms, 0) + " ms" : ms >= 1 ? fixed(ms, 1) + " ms" : fixed(ms, 2) + " ms";
};
export const bytes = (value) => {
  let size = value, unit = 0;
  while (size >= 1000 && unit < 5) { size /= 1000; unit++; }
  return `${fixed(size, unit && size < 100 ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB", "PB"][unit]}`;
};
export const span = (seconds) => {
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${fixed(s / 3600, 1)} h` : `${Math.round(s / 86400)} days`;
};
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
export const many = (count, one, more) => `${number(count)} ${count === 1 ? one : more || one + "s"}`;

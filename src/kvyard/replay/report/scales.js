// What all charts share, those of pages and of the dashboard: round ticks, scales, and where a tip goes.

export const near = (value) => Math.round(value * 100) / 100;

/** Round values from low to high; with whole, none between two integers, for axes of counts. */
export const niceTicks = (low, high, wanted, whole) => {
  if (!(high > low)) high = low + 1;
  const raw = Math.max(whole ? 1 : 0, (high - low) / Math.max(1, wanted));
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * base).find((n) => n >= raw * 0.999 && !(whole && n % 1));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(parseFloat(at.toPrecision(12)));
  return found;
};

export const logTicks = (low, high, wanted) => {
  const found = [];
  const span = Math.log10(high / low);
  const marks = span * 3 <= Math.max(wanted + 1, 5.5) ? [1, 2, 5] : [1];
  const skip = Math.max(1, Math.ceil(span / Math.max(1, wanted)));
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    if (marks.length === 1 && e % skip) continue;
    for (const m of marks) {
      const at = m * 10 ** e;
      if (at >= low * 0.999 && at <= high * 1.001) found.push(parseFloat(at.toPrecision(12)));
    }
  }
  return found.length > 1 ? found : niceTicks(low, high, 4);
};

export const makeScale = (low, high, from, to, log, whole) => {
  if (!(high > low)) high = log ? low * 2 : low + 1;
  const f = log ? Math.log : (v) => v;
  const a = f(low), b = f(high);
  const scale = (v) => from + ((f(log ? Math.max(v, low) : v) - a) / (b - a)) * (to - from);
  scale.back = (at) => { const v = a + ((at - from) / (to - from)) * (b - a); return log ? Math.exp(v) : v; };
  scale.ticks = (n) => (log ? logTicks(low, high, n) : niceTicks(low, high, n, whole));
  return scale;
};

/** Puts a tip that is shown already beside the pointer, inside the window. */
export const placeTip = (tip, event) => {
  const w = tip.offsetWidth, h = tip.offsetHeight, x = event.clientX;
  const left = x + 16 + w > window.innerWidth ? x - w - 14 : x + 16;
  tip.style.left = Math.max(8, Math.min(left, window.innerWidth - w - 8)) + "px";
  tip.style.top = Math.max(8, Math.min(event.clientY - h / 2, window.innerHeight - h - 8)) + "px";
};

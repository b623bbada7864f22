// Draws the figures of a report. Each is a plain description (kind, data, axis titles); nothing here knows what it means.
(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const tip = document.getElementById("tip");
  const paint = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  // -- numbers ------------------------------------------------------------------------------------------------------

  const digits = (value) => {
    const size = Math.abs(value);
    const kept = value === Math.round(value) ? 0 : size >= 1000 ? 0 : size >= 100 ? 1 : size >= 0.1 ? 2 : 4;
    return value.toLocaleString("en-US", { maximumFractionDigits: kept });
  };
  const minutes = (ms) => {
    const seconds = Math.round(ms / 1000), hours = Math.floor(seconds / 3600), rest = Math.floor((seconds % 3600) / 60);
    return hours ? `${hours} h ${rest} min` : `${rest} min ${seconds % 60} s`;
  };
  const show = (value, format) => {
    if (value === null || value === undefined) return "–";
    if (format === "percent") return (value * 100).toLocaleString("en-US", { maximumFractionDigits: 1 }) + "%";
    if (format === "ms") return value >= 120000 ? minutes(value) : value >= 10000 ? digits(value / 1000) + " s" : digits(value) + " ms";
    return digits(value);
  };
  // All ticks of a linear axis, whose largest is most, have the same unit.
  const tickText = (value, format, most) => {
    if (format === "percent") return near(value * 100) + "%";
    if (format === "ms") return value >= 1000 ? (value / 1000).toLocaleString("en-US") + " s" : parseFloat(value.toPrecision(6)) + " ms";
    const size = most ?? Math.abs(value);
    if (value && size >= 1e6) return parseFloat((value / 1e6).toPrecision(6)) + "M";
    if (value && size >= 1e4) return parseFloat((value / 1e3).toPrecision(6)) + "k";
    return parseFloat(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  };
  const tickTexts = (ticks, format, log) => {
    const most = log ? undefined : Math.max(0, ...ticks.map(Math.abs));
    return ticks.map((at) => tickText(at, format, most));
  };

  // -- frames: axes, titles, hover -------------------------------------------------------------------------------------

  const frame = (box, spec, x0, x1, y0, y1, height) => {
    if (box.zoom) [x0, x1] = box.zoom;
    const width = Math.max(260, box.clientWidth);
    const right = 14, top = 10, bottom = 40;
    const sy = makeScale(y0, y1, height - bottom, top, spec.yScale === "log", spec.yFormat === "count"), levels = sy.ticks(4), names = tickTexts(levels, spec.yFormat, spec.yScale === "log");
    const left = Math.max(54, 28 + 7.4 * Math.max(0, ...names.map((name) => name.length)));
    const sx = makeScale(x0, x1, left, width - right, spec.xScale === "log", spec.xFormat === "count");
    let art = "";
    for (const [i, at] of levels.entries()) {
      art += `<line class="gridline" x1="${left}" x2="${width - right}" y1="${near(sy(at))}" y2="${near(sy(at))}"/>`;
      art += `<text x="${left - 7}" y="${near(sy(at)) + 4}" text-anchor="end">${names[i]}</text>`;
    }
    art += `<line class="axis" x1="${left}" x2="${width - right}" y1="${height - bottom}" y2="${height - bottom}"/>`;
    const places = sx.ticks(Math.floor(width / 85)), words = tickTexts(places, spec.xFormat, spec.xScale === "log");
    for (const [i, at] of places.entries()) {
      art += `<line class="axis" x1="${near(sx(at))}" x2="${near(sx(at))}" y1="${height - bottom}" y2="${height - bottom + 4}"/>`;
      art += `<text x="${near(sx(at))}" y="${height - bottom + 17}" text-anchor="middle">${words[i]}</text>`;
    }
    art += `<text class="title" x="${(left + width - right) / 2}" y="${height - 4}" text-anchor="middle">${escape(spec.xTitle)}</text>`;
    art += `<text class="title" transform="translate(11 ${(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">${escape(spec.yTitle)}</text>`;
    return { width, height, left, right, top, bottom, sx, sy, art, zooms: true };
  };
  const finish = (box, spec, f, art) => {
    const clip = `clip${box.dataset.figure}`, shown = f.zooms ? `<clipPath id="${clip}"><rect x="${f.left - 5}" y="0" width="${f.width - f.left - f.right + 10}" height="${f.height}"/></clipPath><g clip-path="url(#${clip})">${art}</g>` : art;
    box.innerHTML = `<svg role="img" aria-label="${escape(spec.label || spec.yTitle)}" viewBox="0 0 ${f.width} ${f.height}" height="${f.height}">${f.art}${shown}<line class="cross" visibility="hidden" y1="${f.top}" y2="${f.height - f.bottom}"/></svg>`;
    const svg = box.querySelector("svg");
    if (f.zooms) zoomable(box, spec, svg, f);
    return svg;
  };
  // Drag across a chart to see that part alone; a button, or a double click, shows all again.
  const zoomable = (box, spec, svg, f) => {
    const at = (event) => { const rect = svg.getBoundingClientRect(); return Math.min(f.width - f.right, Math.max(f.left, ((event.clientX - rect.left) * f.width) / rect.width)); };
    const redraw = () => { hideTip(); kinds[spec.kind](box, spec); };
    let from = null, mark = null;
    svg.onpointerdown = (event) => {
      if (event.pointerType === "touch" || event.button) return;
      from = at(event);
      mark = document.createElementNS(svg.namespaceURI, "rect");
      mark.setAttribute("class", "zoom"); mark.setAttribute("y", f.top); mark.setAttribute("height", f.height - f.bottom - f.top);
      svg.append(mark);
      svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    };
    svg.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const to = at(event);
      mark.setAttribute("x", Math.min(from, to)); mark.setAttribute("width", Math.abs(to - from));
    });
    svg.onpointerup = (event) => {
      if (from === null) return;
      const to = at(event), start = from;
      from = null;
      mark.remove();
      if (Math.abs(to - start) < 8) return;
      box.zoom = [f.sx.back(Math.min(start, to)), f.sx.back(Math.max(start, to))];
      redraw();
    };
    svg.ondblclick = () => { if (box.zoom) { box.zoom = null; redraw(); } };
    if (box.zoom) {
      const all = document.createElement("button");
      all.type = "button"; all.className = "all"; all.textContent = "Show all";
      all.onclick = () => { box.zoom = null; redraw(); };
      box.append(all);
    }
  };
  const showTip = (event, html) => {
    tip.innerHTML = html;
    tip.style.display = "block";
    placeTip(tip, event);
  };
  const hideTip = () => { tip.style.display = "none"; };
  const onHover = (svg, f, found) => {
    const cross = svg.querySelector(".cross");
    const leave = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
    const over = (event) => {
      const rect = svg.getBoundingClientRect();
      const at = ((event.clientX - rect.left) * f.width) / rect.width;
      const hit = at >= f.left - 4 && at <= f.width - f.right + 4 ? found(at, ((event.clientY - rect.top) * f.height) / rect.height) : null;
      if (!hit) { leave(); return; }
      cross.setAttribute("x1", hit.x); cross.setAttribute("x2", hit.x); cross.setAttribute("visibility", "visible");
      showTip(event, hit.html);
    };
    svg.addEventListener("pointermove", over);
    svg.addEventListener("pointerdown", over);
    svg.onpointerleave = leave;
  };
  const chip = (color) => `<i style="background:var(--${color})"></i>`;
  const tipTable = (title, rows) =>
    `<b>${escape(title)}</b><table>${rows.map(([color, name, value]) => `<tr><td>${color ? chip(color) : ""}${escape(name)}</td><td>${escape(value)}</td></tr>`).join("")}</table>`;
  const nearest = (xs, sx, at) => {
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(sx(xs[i]) - at) < Math.abs(sx(xs[best]) - at)) best = i;
    return best;
  };
  const legend = (box, series, line) => {
    if (series.length < 2) return;
    const made = document.createElement("div");
    made.className = "legend";
    made.innerHTML = series.map((s) => `<span><i class="${s.dash ? "dash" : s.only === "dots" ? "dot" : line ? "line" : ""}" style="color:var(--${s.color})"></i>${escape(s.name)}</span>`).join("");
    box.parentNode.insertBefore(made, box);
  };
  const pathOf = (xs, ys, sx, sy) => {
    let d = "", pen = false;
    for (let i = 0; i < xs.length; i++) {
      if (ys[i] === null) continue; // nothing came in that window: go on to the next one
      d += `${pen ? "L" : "M"}${near(sx(xs[i]))} ${near(sy(ys[i]))}`;
      pen = true;
    }
    return d;
  };

  // -- kinds -----------------------------------------------------------------------------------------------------------

  const kinds = {};
  const nothing = (box, spec) => { box.innerHTML = `<p class="none">${escape(spec.none || "There is nothing to draw.")}</p>`; };

  kinds.lines = (box, spec) => {
    const xsOf = (s) => s.x || spec.x;
    const xs = spec.series.flatMap(xsOf), seen = (x) => !box.zoom || (x >= box.zoom[0] && x <= box.zoom[1]);
    let ys = spec.series.flatMap((s) => s.y.filter((v, i) => v !== null && seen(xsOf(s)[i])));
    if (!ys.length) ys = spec.series.flatMap((s) => s.y.filter((v) => v !== null));
    if (!ys.length) { nothing(box, spec); return; }
    const positive = ys.filter((v) => v > 0), least = Math.min(...ys), most = Math.max(...ys);
    // Where an axis from 0 would hide what values do it is fitted to them.
    const fitted = spec.yFit && least > 0;
    // But it spans a fifth of them at least: what differs by 1 % is drawn nearly level.
    const spread = Math.max(most - least, 0.2 * most), middle = (most + least) / 2;
    const low = spec.yScale === "log" ? (positive.length ? Math.min(...positive) * 0.8 : 1) : fitted ? middle - 0.65 * spread : 0;
    const high = spec.yMax || (fitted ? middle + 0.6 * spread : Math.max(most, low) * (spec.yScale === "log" ? 1.25 : 1.06)) || 1;
    const f = frame(box, spec, spec.xMin ?? Math.min(...xs), spec.xMax ?? Math.max(...xs), low, high, spec.height || 250);
    const lines = spec.series.filter((s) => s.only !== "dots");
    const art = lines.map((s) => `<path class="series" d="${pathOf(xsOf(s), s.y, f.sx, f.sy)}" fill="none" stroke="var(--${s.color})" stroke-width="1.75" stroke-linejoin="round" stroke-dasharray="${s.dash || "none"}"/>`).join("");
    // Dots where something was measured: for lines of few points, and for points that no line joins.
    const dotted = spec.series.filter((s) => (spec.dots && s.dots !== false) || s.dots || s.only === "dots");
    const dots = dotted.flatMap((s) => xsOf(s).map((x, i) => (s.y[i] === null ? "" : `<circle class="dot${s.only === "dots" ? " alone" : ""}" cx="${near(f.sx(x))}" cy="${near(f.sy(s.y[i]))}" r="${s.large ? 6 : 3.5}" style="color:var(--${s.color})"/>`))).join("");
    const svg = finish(box, spec, f, art + dots);
    const named = spec.series.filter((s) => s.names);
    onHover(svg, f, (at, down) => {
      // Of dots with names, the nearest alone: many may share an x.
      const one = named.flatMap((s) => s.names.map((name, i) => ({ s, i, name, away: Math.hypot(f.sx(s.x[i]) - at, f.sy(s.y[i]) - down) }))).sort((a, b) => a.away - b.away)[0];
      if (one) return { x: near(f.sx(one.s.x[one.i])), html: tipTable(one.name, [["", spec.xTitle, show(one.s.x[one.i], spec.xTip)], [one.s.color, spec.yTitle, show(one.s.y[one.i], spec.yFormat)]]) };
      const shared = xsOf((lines.some((s) => xsOf(s).length > 2) ? lines : spec.series).reduce((a, b) => (xsOf(a).length >= xsOf(b).length ? a : b)));
      const x = shared[nearest(shared, f.sx, at)];
      const rows = spec.series.map((s) => [s.color, s.name, show(s.y[nearest(xsOf(s), f.sx, f.sx(x))], spec.yFormat)]);
      return { x: near(f.sx(x)), html: tipTable(`${show(x, spec.xTip)} ${spec.xUnit || ""}`, rows) };
    });
  };

  kinds.area = (box, spec) => {
    const n = spec.x.length;
    if (!n || !spec.series.length) { nothing(box, spec); return; }
    const totals = spec.x.map((_, i) => spec.series.reduce((sum, s) => sum + s.y[i], 0));
    const f = frame(box, spec, spec.x[0], spec.x[n - 1], 0, 1, spec.height || 260);
    const base = new Array(n).fill(0);
    let art = "";
    for (const s of spec.series) {
      const top = s.y.map((v, i) => base[i] + (totals[i] ? v / totals[i] : 0));
      // A window without prompts has no shares: leave a gap.
      for (let i = 0; i < n; ) {
        if (!totals[i]) { i++; continue; }
        let j = i;
        while (j + 1 < n && totals[j + 1]) j++;
        const half = n > 1 ? (spec.x[1] - spec.x[0]) / 2 : 0.5;
        const px = [], up = [], down = [];
        for (let k = i; k <= j; k++) { px.push(spec.x[k]); up.push(top[k]); down.push(base[k]); }
        if (i === j) { px.push(spec.x[i] + half); up.push(top[i]); down.push(base[i]); }
        const there = px.map((x, k) => `${near(f.sx(x))} ${near(f.sy(up[k]))}`), back = px.map((x, k) => `${near(f.sx(x))} ${near(f.sy(down[k]))}`).reverse();
        art += `<path class="series" d="M${there.join("L")}L${back.join("L")}Z" fill="var(--${s.color})" stroke="var(--card)" stroke-width="1"/>`;
        i = j + 1;
      }
      for (let i = 0; i < n; i++) base[i] = top[i];
    }
    const svg = finish(box, spec, f, art);
    onHover(svg, f, (at) => {
      const i = nearest(spec.x, f.sx, at);
      const rows = [...spec.series].reverse().filter((s) => s.y[i]).map((s) => [s.color, s.name, `${show(s.y[i] / totals[i], "percent")} · ${show(s.y[i])}`]);
      return { x: near(f.sx(spec.x[i])), html: tipTable(`${show(spec.x[i])} ${spec.xUnit || ""}`, [...rows, ["", spec.what, show(totals[i])]]) };
    });
  };

  kinds.histogram = (box, spec) => {
    const ends = spec.ends, counts = spec.counts;
    if (!counts.length) { nothing(box, spec); return; }
    const f = frame(box, { ...spec, xScale: "log" }, ends[0], ends[ends.length - 1], 0, Math.max(...counts) * 1.12, spec.height || 220);
    const floor = f.height - f.bottom;
    let art = "";
    counts.forEach((count, i) => {
      if (!count) return;
      const a = f.sx(ends[i]), b = f.sx(ends[i + 1]), y = f.sy(count);
      art += `<rect class="series" x="${near(a + 0.5)}" width="${near(Math.max(1, b - a - 1))}" y="${near(y)}" height="${near(floor - y)}" fill="var(--${spec.color})"/>`;
    });
    let edge = -99;
    for (const mark of spec.marks) {
      const x = near(f.sx(mark.x));
      art += `<line class="mark" x1="${x}" x2="${x}" y1="${f.top + 10}" y2="${floor}"/>`;
      // Labels of neighbours stand side by side.
      const middle = near(Math.max(x, edge + 28));
      if (middle - x <= 28 && middle + 12 <= f.width) { art += `<text x="${middle}" y="${f.top + 4}" text-anchor="${middle + 12 > f.width - f.right ? "end" : "middle"}">${escape(mark.name)}</text>`; edge = middle; }
    }
    const svg = finish(box, spec, f, art);
    const total = counts.reduce((a, b) => a + b, 0) + spec.zeros;
    onHover(svg, f, (at) => {
      let i = 0;
      while (i < counts.length - 1 && f.sx(ends[i + 1]) < at) i++;
      const below = counts.slice(0, i + 1).reduce((a, b) => a + b, 0) + spec.zeros;
      const middle = near((f.sx(ends[i]) + f.sx(ends[i + 1])) / 2);
      return { x: middle, html: tipTable(`${show(ends[i], spec.xTip ?? "ms")} to ${show(ends[i + 1], spec.xTip ?? "ms")}`, [[spec.color, spec.yTitle, show(counts[i])], ["", "up to here", show(below / total, "percent")]]) };
    });
  };

  const shortened = (text, room) => (text.length > room ? text.slice(0, Math.max(1, room - 1)) + "…" : text);
  const wrapped = (text, room) => {
    const found = [""];
    for (const word of text.split(" ")) {
      const last = found[found.length - 1];
      if (last && last.length + 1 + word.length > room) found.push(word);
      else found[found.length - 1] = last ? `${last} ${word}` : word;
    }
    return found;
  };
  kinds.bars = (box, spec) => {
    const width = Math.max(260, box.clientWidth), thick = spec.thick || 26, gap = 12;
    const left = spec.names === false ? 2 : Math.min(190, 0.42 * width, 14 + 7 * Math.max(0, ...spec.rows.map((r) => r.name.length))), right = Math.max(10, Math.min(0.4 * width, 14 + 7 * Math.max(0, ...spec.rows.map((r) => (r.text || "").length))));
    const room = Math.max(24, Math.floor((width - 20) / 6.4));
    // From left to right: the line of a mark passes no label of another.
    const marks = (spec.marks || []).map((mark) => ({ ...mark, lines: wrapped(mark.name, room) })).sort((a, b) => a.x - b.x);
    const top = 6 + marks.reduce((sum, mark) => sum + mark.lines.length, 0) * 17, bottom = 40;
    const height = top + spec.rows.length * (thick + gap) + bottom;
    const max = spec.cut || spec.max || Math.max(...spec.rows.map((r) => r.parts.reduce((a, p) => a + p.value, 0)), 1e-9);
    const sx = makeScale(0, max, left, width - right, false), floor = height - bottom;
    let art = "";
    const ticks = sx.ticks(Math.floor((width - left) / 90)), words = tickTexts(ticks, spec.xFormat);
    for (const [i, at] of ticks.entries()) {
      art += `<line class="gridline" x1="${near(sx(at))}" x2="${near(sx(at))}" y1="${top - 4}" y2="${floor}"/>`;
      art += `<text x="${near(sx(at))}" y="${floor + 15}" text-anchor="middle">${words[i]}</text>`;
    }
    const half = 3.2 * spec.xTitle.length, middle = Math.min((left + width - right) / 2, Math.max(half, width - half));
    art += `<text class="title" x="${near(middle)}" y="${height - 4}" text-anchor="middle">${escape(spec.xTitle)}</text>`;
    let labels = ""; // above the lines of marks
    spec.rows.forEach((row, r) => {
      const y = top + r * (thick + gap) + 2;
      if (spec.names !== false) art += `<text class="title" x="${left - 8}" y="${y + thick / 2 + 4}" text-anchor="end">${escape(shortened(row.name, Math.floor((left - 10) / 6.6)))}</text>`;
      let at = 0;
      row.parts.forEach((part, p) => {
        const a = sx(at), b = sx(Math.min(at + part.value, max));
        if (part.value > 0) art += `<rect class="series" data-part="${r}.${p}" x="${near(a + (at ? 1 : 0))}" width="${near(Math.max(1, b - a - (at ? 1 : 0)))}" y="${y}" height="${thick}" rx="2" fill="var(--${part.color})"/>`;
        at += part.value;
      });
      // A bar that is longer than the axis is broken.
      if (spec.cut && at > max) art += `<path class="break" d="M${near(sx(max)) - 18} ${y + thick + 2}l7 ${-thick - 4}m5 0l-7 ${thick + 4}"/>`;
      if (row.text) labels += `<text class="strong" x="${near(sx(Math.min(at, max))) + 7}" y="${y + thick / 2 + 4}">${escape(row.text)}</text>`;
    });
    let line = 0;
    for (const mark of marks) {
      const x = near(sx(mark.x)), widest = 6.4 * Math.max(...mark.lines.map((text) => text.length));
      const beside = x + 6 + widest <= width || x - 6 - widest >= 0;
      art += `<line class="mark" x1="${x}" x2="${x}" y1="${beside ? 4 + line * 17 : top - 4}" y2="${floor}"/>`;
      for (const text of mark.lines) {
        const y = 12 + line * 17, left = x + 6 + widest <= width ? x + 6 : beside ? null : 2;
        labels += left === null ? `<text class="title" x="${x - 6}" y="${y}" text-anchor="end">${escape(text)}</text>` : `<text class="title" x="${near(left)}" y="${y}">${escape(text)}</text>`;
        line++;
      }
    }
    art += labels;
    const svg = finish(box, spec, { width, height, top, bottom, art: "" }, art);
    svg.onpointermove = svg.onpointerdown = (event) => {
      const at = event.target.dataset && event.target.dataset.part;
      if (!at) { hideTip(); return; }
      const [r, p] = at.split(".").map(Number);
      const part = spec.rows[r].parts[p];
      showTip(event, tipTable(spec.rows[r].name, [[part.color, part.name, part.text]]));
    };
    svg.onpointerleave = hideTip;
  };

  kinds.heat = (box, spec) => {
    if (!spec.layers.length) { nothing(box, spec); return; }
    const pick = (number) => {
      const layer = spec.layers[number];
      const width = Math.max(260, box.clientWidth), rows = spec.rows.length, cols = layer.values[0].length;
      const left = Math.min(120, 16 + 7 * Math.max(...spec.rows.map((n) => n.length))), right = 14, bottom = 40;
      const row = Math.max(2, Math.min(28, Math.floor(380 / rows)));
      const height = rows * row, across = width - left - right;
      const ramp = [0, 1, 2, 3, 4, 5].map((i) => { const c = paint("heat" + i); return [1, 3, 5].map((k) => parseInt(c.slice(k, k + 2), 16)); });
      const most = layer.max || Math.max(...layer.values.map((line) => Math.max(...line))) || 1;
      const small = document.createElement("canvas");
      small.width = cols; small.height = rows;
      const pen = small.getContext("2d"), pixels = pen.createImageData(cols, rows);
      for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) {
        const place = Math.min(1, layer.values[r][c] / most) * 5, i = Math.min(4, Math.floor(place)), part = place - i;
        for (let k = 0; k < 3; k++) pixels.data[(r * cols + c) * 4 + k] = Math.round(ramp[i][k] + (ramp[i + 1][k] - ramp[i][k]) * part);
        pixels.data[(r * cols + c) * 4 + 3] = 255;
      }
      pen.putImageData(pixels, 0, 0);
      const sx = makeScale(spec.from, spec.to, left, width - right, false);
      let art = "";
      const every = Math.ceil(14 / row);
      spec.rows.forEach((name, r) => { if (r % every === 0) art += `<text x="${left - 7}" y="${r * row + Math.max(row, 10) / 2 + 4}" text-anchor="end">${escape(name)}</text>`; });
      for (const at of sx.ticks(Math.floor(width / 85))) art += `<line class="axis" x1="${near(sx(at))}" x2="${near(sx(at))}" y1="${height}" y2="${height + 4}"/><text x="${near(sx(at))}" y="${height + 17}" text-anchor="middle">${tickText(at)}</text>`;
      art += `<text class="title" x="${(left + width - right) / 2}" y="${height + bottom - 4}" text-anchor="middle">${escape(spec.xTitle)}</text>`;
      box.innerHTML = `<div class="picks" role="group" aria-label="quantity">${spec.layers.map((l, i) => `<button type="button" aria-pressed="${i === number}">${escape(l.name)}</button>`).join("")}</div>
        <div style="position:relative"><canvas role="img" aria-label="${escape(layer.name)} by worker and time" style="position:absolute;left:${left}px;top:0;width:${across}px;height:${height}px;border-radius:3px"></canvas>
        <svg viewBox="0 0 ${width} ${height + bottom}" height="${height + bottom}" style="pointer-events:none;position:relative">${art}</svg></div>
        <div class="scale"><span>0</span><i></i><span>${escape(show(most, layer.format))} ${escape(layer.unit)}</span></div>`;
      const canvas = box.querySelector("canvas"), sharp = window.devicePixelRatio || 1;
      canvas.width = Math.round(across * sharp); canvas.height = Math.round(height * sharp);
      const brush = canvas.getContext("2d");
      brush.imageSmoothingEnabled = false;
      brush.drawImage(small, 0, 0, canvas.width, canvas.height);
      if (row > 8) { brush.fillStyle = paint("card"); for (let r = 1; r < rows; r++) brush.fillRect(0, Math.round(r * row * sharp) - sharp, canvas.width, 2 * sharp); }
      box.querySelectorAll("button").forEach((button, i) => { button.onclick = () => { box.layer = i; pick(i); box.querySelectorAll("button")[i].focus(); }; });
      canvas.onpointermove = canvas.onpointerdown = (event) => {
        const rect = canvas.getBoundingClientRect();
        const c = Math.min(cols - 1, Math.max(0, Math.floor(((event.clientX - rect.left) / rect.width) * cols)));
        const r = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - rect.top) / rect.height) * rows)));
        const when = spec.from + ((c + 0.5) / cols) * (spec.to - spec.from);
        showTip(event, tipTable(`${spec.rows[r]}, ${digits(near(when))} ${spec.xUnit}`, [["", layer.name, `${show(layer.values[r][c], layer.format)} ${layer.unit}`]]));
      };
      canvas.onpointerleave = hideTip;
    };
    pick(box.layer || 0);
  };

  // -- tables ----------------------------------------------------------------------------------------------------------

  const SIZES = { kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, PB: 1e15, KiB: 1024, MiB: 1048576, GiB: 1073741824, TiB: 1099511627776, s: 1000, min: 60000, h: 3600000 };
  const valueOf = (cell) => {
    const text = cell ? cell.textContent.trim() : "", found = /^[^\d-]*(-?[\d,]*\.?\d+)\s*([A-Za-z]*)/.exec(text);
    return found ? parseFloat(found[1].replace(/,/g, "")) * (SIZES[found[2]] || 1) : null;
  };
  // Tables without parts or sums in them can be sorted by any column: by numbers where all have one, else by words.
  document.querySelectorAll("table.data").forEach((table) => {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    if (body.rows.length < 3 || body.querySelector("tr.part, tr.sum, tr.bound")) return;
    table.classList.add("sorts");
    heads.forEach((head, column) => {
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => ({ row, value: valueOf(row.cells[column]), text: row.cells[column] ? row.cells[column].textContent : "" }));
        const numbers = rows.every((one) => one.value !== null || one.text === "–" || one.text === "");
        rows.sort((a, b) => (numbers ? (a.value ?? Infinity) - (b.value ?? Infinity) : a.text.localeCompare(b.text, "en", { numeric: true })));
        if (down) rows.reverse();
        rows.forEach((one) => body.append(one.row));
      };
      head.onclick = sort;
      head.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } };
    });
  });

  // -- all of them ----------------------------------------------------------------------------------------------------

  const boxes = [...document.querySelectorAll(".chart")];
  // What is folded has no width to be drawn in: it is drawn when it is opened.
  const drawBox = (box) => {
    if (box.closest("details:not([open])")) return;
    const spec = specs[box.dataset.figure];
    kinds[spec.kind](box, spec);
    box.dataset.drawn = "yes";
  };
  const draw = () => boxes.forEach(drawBox);
  const folds = [...document.querySelectorAll("details.fold")];
  folds.forEach((fold) => fold.addEventListener("toggle", () => { if (fold.open) fold.querySelectorAll(".chart").forEach(drawBox); }));
  const unfold = () => folds.forEach((fold) => { fold.open = true; });
  const opened = () => { const fold = folds.find((one) => "#" + one.id === location.hash); if (fold) fold.open = true; };
  window.addEventListener("hashchange", opened);
  window.addEventListener("beforeprint", () => { unfold(); draw(); });
  const contents = document.querySelector(".toc");
  if (folds.length && contents) {
    const all = document.createElement("button");
    all.type = "button"; all.textContent = "Open all"; all.onclick = unfold;
    contents.append(all);
  }
  boxes.forEach((box) => {
    const spec = specs[box.dataset.figure];
    if (spec.legend) legend(box, spec.legend, false);
    else if (spec.series) legend(box, spec.series.filter((s) => s.only !== "dots"), spec.kind === "lines");
  });
  draw();
  opened();
  let width = window.innerWidth, timer = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(draw, 80);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();

/* Charts: lines, marks and how they are read by pointer, finger, keyboard and screen reader. */
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const DASHES = { dash: [8, 5], dot: [2, 4] };

/* An element with attributes and children: elements, or text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

const ink = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const finite = value => value !== null && value !== undefined && Number.isFinite(value);

function scaled(value, base, units) {
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= base; power += 1; }
  return `${Number(value.toPrecision(3))} ${units[power]}`.trim();
}

/* uPlot's own begin at the lowest value, wherever that is. */
function decades(low, high) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    found.push(...[1, 2, 5].map(digit => digit * power).filter(value => value >= low && value <= high));
  }
  return found;
}

const worded = (value, unit) => unit === "bytes" ? scaled(value, 1000, ["B", "kB", "MB", "GB", "TB"])
  : Math.abs(value) >= 1e4 ? scaled(value, 1000, ["", "k", "M", "G"])
  : String(Number(value.toPrecision(4)));

let share = 0.025;  // of the steps, that smoothing reaches to either side

/* At every row the line that fits `reach` rows to either side best, nearer ones most: inside it is
   their weighted mean, and at the ends it neither lags nor bends. Rows without a value are left out. */
function smoothed(values, reach) {
  const known = values.map(finite), first = known.indexOf(true), last = known.lastIndexOf(true);
  return values.map((own, i) => {
    if (i < first || i > last) return null;
    const missing = Math.max(0, reach - Math.min(i, values.length - 1 - i)), span = reach + missing;
    let w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
    for (let j = Math.max(0, i - span); j <= Math.min(values.length - 1, i + span); j += 1) {
      const y = values[j];
      if (!finite(y)) continue;
      const x = j - i, weight = Math.max(1e-6, 1 - Math.abs(x) / (span + 1));
      w += weight; wx += weight * x; wy += weight * y; wxx += weight * x * x; wxy += weight * x * y;
    }
    if (!w) return null;
    const spread = wxx - wx * wx / w, slope = spread > 1e-9 ? (wxy - wx * wy / w) / spread : 0;
    return (wy - slope * wx) / w;
  });
}

/* What a line draws, with the smoothed one that goes with it. */
function linesOf(spec, columns) {
  const steps = columns.step, reach = Math.round(share * steps.length);
  const each = steps.length > 1 ? steps[1] - steps[0] : 1, found = [];
  const smooth = name => share ? smoothed(columns[name] || [], Math.max(1, reach)) : columns[name];
  for (const line of spec.lines) {
    const values = columns[line.column];
    if (!values || !values.some(finite)) continue;
    const label = `smoothed: line fitted to \u00b1${Math.max(1, reach) * each} ${spec.along || "step"}s`;
    if (line.at) {
      const at = smooth(line.at);
      found.push({ ...line, values: values.map((v, i) => finite(v) ? at[i] : null) });
    } else if (line.smooth && share) {
      if (line.smooth !== "only") found.push(line.look === "thin" ? { ...line, values } : line);
      const only = line.smooth === "only";
      found.push({ ...line, look: only ? line.look : "line", values: smooth(line.column),
        label: only ? `${line.label}, ${label}` : label });
    } else found.push({ ...line, look: line.smooth && line.look === "thin" ? "line" : line.look, values });
  }
  return found;
}

function mark(context, line, x, y, size) {
  context.beginPath();
  if (line.look === "diamond") {
    context.moveTo(x, y - size); context.lineTo(x + size, y); context.lineTo(x, y + size);
    context.lineTo(x - size, y); context.closePath();
    context.fillStyle = ink("--card"); context.fill(); context.stroke();
  } else { context.arc(x, y, size * 0.8, 0, 7); context.fillStyle = context.strokeStyle; context.fill(); }
}
const isMark = line => line.look === "disc" || line.look === "diamond";

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.output = make("output", { "aria-live": "polite" });
    this.legend = make("ul", { class: "legend" });
    this.plot = make("div", { class: "plot", tabindex: 0, role: "img", onkeydown: e => this.key(e) });
    const button = (text, name, act) => make("button", { type: "button", title: name,
      "aria-label": `${spec.title}: ${name}`, onclick: act }, text);
    this.element = make("figure", { class: "panel" },
      make("div", { class: "bar" }, make("h3", {}, spec.title),
        button("\u2212", "zoom out", () => this.zoom(2)), button("+", "zoom in", () => this.zoom(0.5)),
        button("\u2190", "earlier", () => this.pan(-0.5)), button("\u2192", "later", () => this.pan(0.5)),
        button("All", "show all", () => this.all())),
      this.plot, this.legend, this.output);
    if (spec.text) this.element.append(make("details", {}, make("summary", {}, "How to read this"),
      make("p", {}, spec.text)));
    this.range = null;
    new ResizeObserver(() => this.fit()).observe(this.plot);
  }

  /* Draw `lines` of {label, values, color, look} over `steps`; keeps what was zoomed to. */
  show(steps, lines, epochs = []) {
    const same = this.u && JSON.stringify(this.lines.map(l => [l.label, l.look, l.color]))
      === JSON.stringify(lines.map(l => [l.label, l.look, l.color]));
    this.steps = steps; this.lines = lines; this.epochs = epochs;
    const data = [steps, ...lines.map(line => line.values)], ends = this.range;
    this.plot.setAttribute("aria-label", `${this.spec.title}. ${this.told(steps.length - 1)}. `
      + "Arrow keys read values, plus and minus zoom, 0 shows all.");
    if (same) this.u.setData(data, false);
    else this.build(data);
    const [low, high] = ends || this.whole();
    this.u.setScale("x", { min: low, max: high });
    this.range = ends;
  }

  whole() {
    const steps = this.steps, first = steps[0], last = steps[steps.length - 1];
    return [first, last > first ? last : first + 1];
  }

  build(data) {
    if (this.u) this.u.destroy();
    const spec = this.spec, font = "12px system-ui, sans-serif", muted = ink("--muted");
    const axis = { stroke: muted, font, grid: { stroke: ink("--line"), width: 1 }, ticks: { show: false } };
    const series = this.lines.map(line => ({
      label: line.label, stroke: ink(`--c${line.color}`), dash: DASHES[line.look], spanGaps: Boolean(line.gaps),
      width: line.look === "thin" ? 1 : line.look === "faint" ? 0.5 : 2, alpha: { thin: 0.45, faint: 0.35 }[line.look] || 1,
      paths: isMark(line) ? () => null : undefined, points: { show: this.single(line), size: 5 },
    }));
    const log = Boolean(spec.log);
    this.u = new uPlot({
      width: Math.max(200, this.plot.clientWidth), height: innerWidth < 500 ? 210 : 260,
      padding: [14, 22, 0, 0], legend: { show: false }, cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: (u, low, high) => this.span(low, high) } },
      axes: [{ ...axis, size: 32, space: 70, values: (u, ticks) => ticks.map(t => Number.isInteger(t) ? t.toLocaleString("en") : "") },
        { ...axis, size: 66, space: 36, values: (u, ticks) => ticks.map(t => worded(t, spec.unit)),
          ...(log && { splits: (u, axis, low, high) => decades(low, high), filter: (u, ticks) => ticks }) }],
      series: [{}, ...series],
      hooks: { draw: [u => this.marks(u)], setCursor: [u => this.read(u.cursor.idx)],
        setScale: [(u, key) => { if (key === "x") this.zoomed(u); }] },
    }, data, this.plot);
    this.touches(this.u.over);
    this.legend.replaceChildren(...this.lines.map(line => make("li", {}, sample(line), line.label)));
  }

  /* A finger reads values, or moves a chart that is zoomed; two zoom it where they are. */
  touches(over) {
    const down = new Map(), place = event => {
      const box = over.getBoundingClientRect(), left = event.clientX - box.left;
      down.set(event.pointerId, left);
      this.u.setCursor({ left, top: event.clientY - box.top });
    };
    over.addEventListener("pointerdown", event => { if (event.pointerType === "touch") place(event); });
    over.addEventListener("pointermove", event => {
      if (!down.has(event.pointerId)) return;
      const before = [...down.values()];
      place(event);
      this.drag(before, [...down.values()], over.clientWidth);
    });
    for (const end of ["pointerup", "pointercancel"]) over.addEventListener(end, event => down.delete(event.pointerId));
  }

  /* Places of fingers in pixels: what was in their middle stays there. */
  drag(before, after, width) {
    const [low, high] = this.range || this.whole(), step = (high - low) / width;
    const middle = all => (Math.min(...all) + Math.max(...all)) / 2, gap = all => Math.max(20, Math.max(...all) - Math.min(...all));
    const factor = gap(before) / gap(after), start = low + step * (middle(before) - factor * middle(after));
    this.set(start, start + (high - low) * factor);
  }

  single(line) { return !isMark(line) && line.values.filter(finite).length === 1; }

  span(low, high) {
    const levels = (this.spec.levels || []).map(level => level[1]);
    if (!finite(low)) { low = levels[0] || 1; high = low; }
    low = Math.min(low, ...levels); high = Math.max(high, ...levels);
    if (this.spec.log) return [Math.max(low, 1e-9) / 1.3, high * 1.3];
    if (this.spec.zero) return [Math.min(0, low), high > 0 ? high * 1.08 : 1];
    const room = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [low - room, high + room];
  }

  /* Marks, epochs and levels: what lines alone do not say. */
  marks(u) {
    const context = u.ctx, ratio = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
    context.save();
    context.font = `${11 * ratio}px system-ui, sans-serif`; context.lineWidth = ratio; context.textAlign = "left";
    context.strokeStyle = context.fillStyle = ink("--muted");
    let free = left;
    for (const [step, number] of this.epochs) {
      const x = u.valToPos(step, "x", true), text = `epoch ${number}`;
      if (x < free || x > left + width - 20 * ratio) continue;
      context.setLineDash([2 * ratio, 3 * ratio]);
      context.beginPath(); context.moveTo(x, top); context.lineTo(x, top + height); context.stroke();
      context.fillText(text, x + 3 * ratio, top - 3 * ratio);
      free = x + context.measureText(text).width + 14 * ratio;
    }
    for (const [name, level] of this.spec.levels || []) {
      const y = u.valToPos(level, "y", true);
      context.setLineDash([ratio, 4 * ratio]);
      context.beginPath(); context.moveTo(left, y); context.lineTo(left + width, y); context.stroke();
      context.fillText(name, left + width - context.measureText(name).width - 2 * ratio, y - 4 * ratio);
    }
    context.setLineDash([]); context.lineWidth = 1.6 * ratio;
    context.beginPath(); context.rect(left - 6 * ratio, top, width + 12 * ratio, height); context.clip();
    this.lines.forEach(line => {
      if (!isMark(line)) return;
      context.strokeStyle = ink(`--c${line.color}`);
      line.values.forEach((value, i) => {
        if (finite(value)) mark(context, line, u.valToPos(this.steps[i], "x", true), u.valToPos(value, "y", true), 4.5 * ratio);
      });
    });
    context.restore();
  }

  told(i) {
    const values = this.lines.filter(line => finite(line.values[i]))
      .map(line => `${line.label.replace(/: line.*/, "")} ${worded(line.values[i], this.spec.unit)}`);
    return `${this.spec.along || "step"} ${(this.steps[i] || 0).toLocaleString("en")}: ${values.join(", ") || "no value"}`;
  }

  read(i) { this.at = i; this.output.textContent = finite(i) ? this.told(i) : ""; }

  go(i) {
    const at = Math.min(this.steps.length - 1, Math.max(0, i)), [low, high] = this.range || this.whole();
    if (this.steps[at] < low || this.steps[at] > high) return;
    this.u.setCursor({ left: this.u.valToPos(this.steps[at], "x"), top: 10 });
    this.read(at);
  }

  key(event) {
    if (event.target !== this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.steps.length - 1, at = finite(this.at) ? this.at : last, far = event.shiftKey ? Math.ceil(last / 20) : 1;
    const act = { ArrowLeft: () => this.go(at - far), ArrowRight: () => this.go(at + far), Home: () => this.go(0),
      End: () => this.go(last), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.all() }[event.key];
    if (act) { event.preventDefault(); act(); }
  }

  zoom(factor) {
    const [low, high] = this.range || this.whole(), at = finite(this.at) ? this.steps[this.at] : (low + high) / 2;
    const middle = Math.min(high, Math.max(low, at)), half = (high - low) * factor / 2;
    this.set(middle - half, middle + half);
  }
  pan(part) {
    const [low, high] = this.range || this.whole(), by = part * (high - low);
    this.set(low + by, high + by);
  }
  set(low, high) {
    const [first, last] = this.whole(), width = Math.min(Math.max(2, high - low), last - first);
    const start = Math.min(Math.max((low + high - width) / 2, first), last - width);
    this.u.setScale("x", { min: start, max: start + width });
  }
  all() { const [min, max] = this.whole(); this.u.setScale("x", { min, max }); }
  zoomed(u) {
    const { min, max } = u.scales.x, [first, last] = this.whole();
    this.range = min > first || max < last ? [min, max] : null;
  }
  fit() {
    const width = this.plot.clientWidth;
    if (this.u && width && width !== this.u.width) this.u.setSize({ width, height: this.u.height });
  }
  redraw() { if (this.u) { this.build([this.steps, ...this.lines.map(line => line.values)]); } }
}

/* The look of a line, so that no colour is needed to find it. */
function sample(line) {
  const svg = document.createElementNS(SVG, "svg"), isDot = isMark(line);
  const shape = document.createElementNS(SVG, isDot ? "path" : "line");
  svg.setAttribute("viewBox", "0 0 26 12"); svg.setAttribute("aria-hidden", "true");
  const set = isDot ? { d: line.look === "disc" ? "M13 2a4 4 0 1 0 .1 0z" : "M13 1l5 5-5 5-5-5z" } : { x1: 1, x2: 25, y1: 6, y2: 6 };
  for (const [name, value] of Object.entries(set)) shape.setAttribute(name, value);
  shape.style.stroke = `var(--c${line.color})`;
  shape.style.fill = line.look === "disc" ? `var(--c${line.color})` : "none";
  shape.style.strokeWidth = { thin: 1, faint: 0.5 }[line.look] || 2;
  shape.style.strokeDasharray = (DASHES[line.look] || []).join(" ");
  svg.append(shape);
  return svg;
}

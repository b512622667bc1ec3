/* The page of `thinpipe watch` and of reports. Whatever is shown is text, never markup. */
"use strict";
const $ = id => document.getElementById(id);
const runs = [], charts = new Map(), drawn = new Map();
let chosen = 0, compared = null, due = false;

function tableOf(spec) {
  const cell = (content, i, kind) => {
    const [text, title] = Array.isArray(content) ? content : [content, false];
    const first = i === 0 && kind === "td";
    return make(first ? "th" : kind, { class: i >= spec.texts && "n", title, scope: kind === "th" ? "col" : first && "row" }, text);
  };
  const line = (cells, kind) => make("tr", {}, ...cells.map((content, i) => cell(content, i, kind)));
  const table = make("table", {}, make("caption", {}, spec.title), make("thead", {}, line(spec.heads, "th")),
    make("tbody", {}, ...spec.rows.map(row => line(row, "td"))));
  if (spec.total) table.append(make("tfoot", {}, line(spec.total, "td")));
  const text = spec.text ? [make("p", { class: "muted" }, spec.text)] : [];
  return make("div", { class: "panel" }, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": spec.title }, table), ...text);
}

/* Replace what `key` drew in a section, if it changed. */
function put(section, key, value, elements) {
  const now = JSON.stringify(value), name = `${section} ${key}`;
  if (drawn.get(name)?.now === now) return;
  drawn.get(name)?.elements.forEach(element => element.remove());
  const made = elements();
  $(section).append(...made);
  drawn.set(name, { now, elements: made });
}

function chartIn(section, spec, steps, lines, epochs) {
  const key = `${section} ${spec.title}`;
  let chart = charts.get(key);
  if (!chart) {
    charts.set(key, chart = new Chart(spec));
    const others = [...$(section).children].filter(element => element.tagName === "FIGURE");
    (others.at(-1) || $(section).firstElementChild).after(chart.element);
  }
  chart.spec = spec; chart.used = true;
  $(section).hidden = false;
  if (lines.length) chart.show(steps, lines, epochs);
}

function epochsOf(columns) {
  const { step, epoch } = columns, starts = [];
  for (let i = 0; i < step.length; i += 1) if (i === 0 || epoch[i] !== epoch[i - 1]) starts.push([step[i], epoch[i]]);
  return starts;
}

function logOf(notes, name) {
  const item = note => make("li", { class: note.kind }, make("time", { datetime: new Date(note.at_s * 1000).toISOString() },
    `${new Date(note.at_s * 1000).toLocaleString()}, step ${note.step.toLocaleString("en")}`), note.text);
  return make("div", { class: "log", role: "log", tabindex: 0, "aria-label": name },
    make("ol", {}, ...notes.slice().reverse().map(item)));
}

function render() {
  due = false;
  const run = runs[chosen];
  if (!run) return;
  const { parts, columns } = run, { head } = parts;
  document.title = `${head.name} - ThinPipe`;
  $("name").textContent = head.name; $("about").textContent = head.about;
  const well = !head.over && !run.silence, left = well && head.left && live.words ? `About ${head.left} left.` : "";
  $("state").textContent = [live.problem, !well && live.words === "Live." ? "" : live.words, head.state || "Finished.",
    left, run.silence, run.told_s && !head.over ? `As of ${new Date(run.told_s * 1000).toLocaleString()}.` : ""].filter(Boolean).join(" ");
  $("progress").hidden = head.over; $("progress").max = head.total; $("progress").value = head.done;
  charts.forEach(chart => { chart.used = false; });
  put("cards", "cards", parts.cards, () => parts.cards.map(([name, value]) =>
    make("div", { class: "card" }, make("span", {}, name), make("strong", {}, value))));
  for (const spec of parts.charts) {
    const own = spec.columns || columns;
    chartIn(spec.place, spec, own.step, linesOf(spec, own), spec.columns ? [] : epochsOf(columns));
  }
  if (runs.filter(Boolean).length > 1) overlay();
  charts.forEach(chart => { chart.element.hidden = !chart.used; });
  const tables = compared ? [...parts.tables, compared.table] : parts.tables;
  for (const place of ["bytes", "error", "places", "edges", "compared"])
    put(place, "tables", tables.filter(t => t.place === place), () => tables.filter(t => t.place === place).map(tableOf));
  put("timeline", "image", parts.timeline, () => parts.timeline ? [make("div", { class: "panel" },
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Timeline of one step" },
      make("img", { class: "timeline", src: parts.timeline.src, alt: parts.timeline.alt })),
    make("details", {}, make("summary", {}, "How to read this"), make("p", {}, parts.timeline.text)))] : []);
  for (const name of ["samples", "notes"])
    put(name, "log", parts[name], () => parts[name].length ? [make("div", { class: "panel" }, logOf(parts[name], $(name).firstElementChild.textContent))] : []);
  put("details", "list", parts.details, () => [make("div", { class: "panel" }, make("dl", {},
    ...parts.details.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])))]);
  for (const section of document.querySelectorAll("section"))
    section.hidden = ![...section.children].some(element => element.tagName !== "H2" && !element.hidden);
}

/* Smoothed losses and evaluations of all runs on common steps. */
function overlay() {
  const names = compared ? compared.names : runs.map(run => run.parts.head.name);
  put("runs", "buttons", [names, chosen], () => names.map((name, i) => make("button", { type: "button",
    "aria-pressed": String(i === chosen), onclick: () => { chosen = i; charts.forEach(c => { c.range = null; }); plan(); } }, name)));
  $("runs").hidden = false;
  const tables = [], looks = ["line", "dash", "dot"], lines = [];
  runs.forEach((run, i) => {
    const { step, loss } = run.columns, has = run.columns.eval;
    const mean = share ? smoothed(loss, Math.max(1, Math.round(share * step.length))) : loss;
    tables.push([step, mean, has || step.map(() => null)]);
    lines.push({ label: `${names[i]}, training`, color: i % 6, look: looks[(i + Math.floor(i / 6)) % 3], gaps: true });
    lines.push({ label: `${names[i]}, evaluation`, color: i % 6, look: i % 2 ? "diamond" : "disc" });
  });
  const [steps, ...values] = uPlot.join(tables);
  const full = lines.map((line, i) => ({ ...line, values: values[i] })).filter(line => line.values.some(finite));
  chartIn("compared", { title: "Losses by step, smoothed" }, steps, full, []);
}

function plan() { if (!due) { due = true; requestAnimationFrame(render); } }

/* A message replaces rows of a run from `start` on, and those parts of it that changed. */
function apply(message) {
  if (message.problem !== undefined) { live.problem = message.problem; tell(live.words); }
  else if (message.over) { live.over = true; tell(""); }
  else if (message.table) compared = message;
  else if (message.run !== undefined) {
    const run = runs[message.run] ||= { columns: {}, parts: {}, silence: "" };
    if (message.columns) {
      const rows = message.start + message.columns.step.length;
      for (const name of new Set([...Object.keys(run.columns), ...Object.keys(message.columns)])) {
        const kept = (run.columns[name] || []).slice(0, message.start);
        while (kept.length < message.start) kept.push(null);
        run.columns[name] = kept.concat(message.columns[name] || new Array(rows - message.start).fill(null));
      }
    }
    Object.assign(run.parts, message.parts);
    run.silence = message.silence ?? run.silence;
    run.told_s = message.told_s;
  }
  plan();
}

const live = { words: "", problem: "", over: false };
function tell(words) {
  live.words = words;
  if (runs.length) plan();
  else $("state").textContent = live.problem || (words === "Live." ? "Live. Waiting for the first step." : words || "The run ended before its first step.");
}

async function follow() {
  const token = location.hash.slice(1), wait = seconds => new Promise(done => setTimeout(done, 1000 * seconds));
  for (;;) {
    let problem = "No connection to the run's machine; trying again.";
    try {
      const answer = await fetch("events", { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
      if (answer.status === 503) problem = "Too many people are watching this page; trying again.";
      if (answer.status === 401) return tell("This page needs the whole link that was printed where it was started, with its token.");
      if (answer.ok) {
        live.over = false; tell("Live.");
        await listen(answer.body.pipeThrough(new TextDecoderStream()).getReader());
      }
    } catch { /* the server is gone, or the network: tried again */ }
    if (live.over && runs.length && runs.every(run => !run.parts.head.state)) return;
    if (!live.over) tell(problem);
    await wait(live.over ? 10 : 2);  // a run that failed may be started again
  }
}
async function listen(reader) {
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) apply(JSON.parse(event.slice(6)));
  }
}

function controls() {
  const choices = [[0, "none"], [0.01, "1 % of the steps"], [0.025, "2.5 % of the steps"], [0.05, "5 % of the steps"]];
  const select = make("select", { id: "smoothing", onchange: () => { share = Number(select.value); plan(); } },
    ...choices.map(([value, text]) => make("option", { value, selected: value === share }, text)));
  $("cards").after(make("div", { class: "bar" }, make("label", { for: "smoothing", class: "muted" }, "Smoothing, to either side"), select));
}

controls();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(chart => chart.redraw()));
const data = JSON.parse($("data").textContent);
if (data) data.forEach(apply); else follow();

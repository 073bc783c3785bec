// The page: what stands above and below the charts, and news of a run that goes on.

let data = JSON.parse(byId("data").textContent);
const live = document.documentElement.dataset.live === "yes";

const absolute = (moment) => new Date(1000 * (data.began + moment)).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });

// ------------------------------------------------------------------------------------------------ above

function verdictOf({ state, verdict }) {
  if (state === "running" || state === "stopping") return [state, "wait"];
  if (!verdict) return [live ? "running, as far as the log says" : "outcome not recorded", "wait"];
  return [verdict, verdict === "finished" ? "good" : verdict === "stopped" ? "wait" : "bad"];
}

function showHead() {
  const [text, tone] = verdictOf(data), badge = byId("verdict");
  badge.textContent = text;
  badge.className = `badge ${tone}`;
  byId("kind").textContent = live ? "live" : "report";
  byId("run").textContent = data.run;
  byId("command").textContent = (data.command || []).join(" ");
  document.title = `${text}: ${data.run}`;
  byId("definition").textContent = data.goodput_definition;
}

function showFigures() {
  const one = data.figures;
  const epochs = one.num_epochs ? ` of ${one.num_epochs}` : "";
  const left = one.eta_s && data.state === "running" ? `, about ${duration(one.eta_s)} left` : "";
  const undone = one.undone_samples ? `${brief(one.undone_samples)} more were undone` : `step ${count(one.step)}, epoch ${one.epoch + 1}${epochs}`;
  const begin = data.figures.duration_s ? `since ${absolute(0)}${left}` : "nothing has happened yet";
  const figures = [
    ["Duration", duration(one.duration_s), begin],
    ["Goodput", percent(one.goodput), "of the workers' time (defined below)"],
    ["Samples trained", one.samples < 1e6 ? count(one.samples) : brief(one.samples), undone],
    ["Workers", count(one.world_size), `${count(one.num_workers_ever)} processes in all`],
    ["Changes survived", count(one.num_changes), one.dealt_again ? `${count(one.dealt_again)} samples dealt again` : "no sample dealt again"],
    ["Paused in all", duration(one.paused_s), one.num_changes ? `${duration(one.paused_s / one.num_changes)} for each change` : "no change of workers"],
    ["Speed", `${brief(speed())}/s`, data.state === "running" ? "samples, lately" : "samples, on average"],
    ["Checkpoints", count(data.num_checkpoints), data.checkpoints.length ? `newest at step ${count(data.checkpoints.at(-1).step)}` : "none saved"],
  ];
  byId("figures").replaceChildren(...figures.map(([name, value, more]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, more)))));
}

function speed() {
  if (data.state === "running") return data.figures.samples_per_s;
  return data.figures.duration_s ? data.figures.samples / data.figures.duration_s : 0;
}

function showAudit() {
  const { audit } = data, list = byId("audit");
  if (!audit || !audit.properties.length) {
    const why = audit ? audit.why : live ? "The audit is made when the run has ended." : "The audit was left out.";
    list.replaceChildren(element("li", {}, element("span", { class: "mark" }, "–"), element("span", { class: "name" }, "none"), element("span", {}, why)));
    return;
  }
  list.replaceChildren(...audit.properties.map((one) => {
    const [kind, mark, words] = !one.ok ? ["fails", "✗", "broken"] : one.checked ? ["holds", "✓", "holds"] : ["unknown", "–", "not recorded"];
    return element("li", { class: kind },
      element("span", { class: "mark", title: words }, mark),
      element("span", { class: "name" }, one.name, element("span", { class: "hidden" }, ` ${words}:`)),
      element("span", { class: "detail" }, one.detail));
  }));
}

function showLegend() {
  const swatch = (name) => element("i", { color: name });
  const line = (name) => { const made = element("i", { class: "line" }); made.style.borderColor = `var(--${name})`; return made; };
  const cross = element("i", { class: "glyph" }, "✕");
  cross.style.color = "var(--lost)";
  const items = [
    [swatch("warming"), "warming up"], [swatch("training"), "training"], [swatch("slow"), "slow"], [swatch("leaving"), "leaving"],
    [cross, "lost"], [line("lost"), "workers lost"], [line("joined"), "workers joined"], [line("left"), "workers left"],
  ];
  byId("legend").replaceChildren(...items.map(([mark, text]) => element("span", {}, mark, text)));
}

// ------------------------------------------------------------------------------------------------ below

const FIRST_ROWS = 20;
const open = new Set();

// columns: [title, value of a row (text or element), class]
function showTable(id, columns, rows, total, nothing) {
  const place = byId(id);
  if (!rows.length) { place.replaceChildren(element("p", { class: "muted" }, nothing)); return; }
  const shown = open.has(id) ? rows : rows.slice(-FIRST_ROWS);
  const head = element("tr", {}, ...columns.map(([title, , kind = ""]) => element("th", { class: kind, scope: "col" }, title)));
  const lines = [...shown].reverse().map((row) =>
    element("tr", {}, ...columns.map(([title, value, kind = ""]) => {
      const content = [value(row)].flat();
      const cell = element("td", { class: content[0] === "–" ? `${kind} none` : kind }, ...content);
      cell.dataset.label = title;
      return cell;
    })));
  place.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)));
  if (shown.length < rows.length) {
    const more = () => { open.add(id); showTable(id, columns, rows, total, nothing); };
    place.append(element("button", { type: "button", on: { click: more } }, `Show all ${count(rows.length)}`));
  }
  if (rows.length < total) place.append(element("p", { class: "muted" }, `The newest ${count(rows.length)} of ${count(total)}.`));
}

function moment(row) {
  const zoom = () => {
    const width = Math.max(20 * (row.pause_s || 0), data.now / 100, 0.5);
    charts.show([row.time - width, row.time + width]);
    byId("charts").scrollIntoView({ block: "nearest" });
  };
  return element("button", { type: "button", class: "at", title: `${absolute(row.time)}: zoom in`, on: { click: zoom } }, clock(row.time, 0.1));
}

function showTables() {
  const tag = (row) => (row.before ? element("span", { class: "tag", color: TONES[row.tone] || "training" }) : element("span", { class: "tag", color: "training" }));
  showTable("changes", [
    ["Time", moment, "number"],
    ["What, and why", (row) => [tag(row), row.text], "wide"],
    ["Workers", (row) => (row.before ? `${row.before} → ${row.after}` : `${row.after}`), "number"],
    ["Pause", (row) => (row.before && row.tone !== "ended" ? duration(row.pause_s) : "–"), "number"],
    ["Dealt again", (row) => (row.dealt_again ? `${count(row.dealt_again)} samples` : "–"), "number"],
    ["Global batch", (row) => (row.batch ? `${count(row.batch[0])} → ${count(row.batch[1])}` : "–"), "number"],
  ], data.changes, data.num_changes, "No view of workers was recorded.");
  showTable("checkpoints", [
    ["Time", moment, "number"],
    ["Step", (row) => count(row.step), "number"],
    ["Size", (row) => bytes(row.bytes), "number"],
    ["Saved in", (row) => duration(row.seconds), "number"],
    ["By worker", (row) => row.worker, "wide"],
  ], data.checkpoints, data.num_checkpoints, "No checkpoint was saved.");
  showTable("news", [
    ["Time", moment, "number"],
    ["What", (row) => row.text, "wide"],
    ["Told by", (row) => row.worker, "name"],
  ], data.news, data.num_news, "There was nothing to warn of.");
}

// ------------------------------------------------------------------------------------------------ all of it

const charts = new Charts(byId("charts"));
const plural = (word) => (number) => (number === 1 ? word : `${word}s`);
const parts = {};

function build() {
  parts.workers = addLevels(charts, "Workers in training", plural("worker"), { whole: true });
  parts.speed = addSpeed(charts);
  parts.loss = addLoss(charts);
  parts.batch = addLevels(charts, "Global batch", plural("sample"), { whole: true });
  parts.scale = addLevels(charts, "Scale of the learning rate", () => "×");
  parts.pauses = addPauses(charts);
  parts.lanes = addLanes(charts, data);
  charts.onRange = (range) => { byId("reset").hidden = range === null; };
  byId("reset").addEventListener("click", () => charts.show(null));
}

function show() {
  showHead();
  showFigures();
  showAudit();
  showTables();
  const now = Math.max(data.now, 0.001);
  charts.full = [0, now];
  charts.marks = data.changes.filter((one) => one.before > 0);
  parts.workers.update(data.world_size, now);
  parts.speed.update(data.series);
  parts.loss.update(data.series);
  parts.batch.update(data.global_batch_size, now);
  parts.scale.update(data.lr_scale, now);
  parts.pauses.update(data.changes);
  parts.lanes.update(data);
  charts.redraw();
}

function footer(text) {
  const forgotten = data.num_forgotten ? ` ${count(data.num_forgotten)} processes that ended long ago have no lane any more.` : "";
  byId("footer").textContent = text + forgotten;
}

function follow() {
  const source = new EventSource("events");
  source.addEventListener("state", (event) => {
    data = JSON.parse(event.data);
    show();
    footer(`Live: as of ${absolute(data.now)}.`);
    if (data.state !== "running" && data.state !== "stopping" && data.state !== "unknown" && data.audit) source.close();
  });
  source.addEventListener("error", () => footer("The connection is lost; the page tries to connect again."));
}

showLegend();
build();
show();
footer(`Moments are counted from ${absolute(0)}, the first event of the log. Zoomed in, a point of samples per second and loss stands for ${duration(data.series.bucket_s)}.`);
if (live) follow();

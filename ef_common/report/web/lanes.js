// A lane for each process, on the axis of time of the charts. States differ in shape as well as in color.

const TALLEST = 22, SHORTEST = 3, LANES_HEIGHT = 760, FEW = 40;
const ENDS = {
  lost: "lost: the others went on without it",
  left: "left as it was asked to",
  ended: "ended with the program",
  silent: "its log ends here",
};

function addLanes(charts, data) {
  const chart = { data: [[0, 1], [null, null]], lanes: data.lanes, changes: data.changes, checkpoints: data.checkpoints };
  const rowOf = () => Math.min(Math.max(Math.floor(LANES_HEIGHT / Math.max(chart.lanes.length, 1)), SHORTEST), TALLEST);
  chart.update = (next) => {
    const rows = chart.lanes.length;
    Object.assign(chart, { lanes: next.lanes, changes: next.changes, checkpoints: next.checkpoints });
    if (rows !== next.lanes.length) chart.plot.setSize({ width: charts.width, height: heightOf(next.lanes.length) + 30 });
    chart.plot.setData(chart.data, false);
  };
  const heightOf = (rows) => Math.max(rows, 1) * rowOf() + 18;
  charts.add(chart, {
    title: "Processes, and checkpoints ◆",
    height: heightOf(data.lanes.length),
    labels: true,
    series: [{ paths: () => null, points: { show: false } }],
    scale: { dir: -1, range: () => [-18 / rowOf(), chart.lanes.length || 1] },
    axes: {
      grid: { show: false },
      splits: () => {
        const every = Math.ceil(14 / rowOf());
        return chart.lanes.map((_, row) => row + 0.5).filter((_, row) => row % every === 0);
      },
      values: (_, splits) => splits.map((split) => shortName(chart.lanes, Math.floor(split))),
    },
    hooks: { draw: [(plot) => drawLanes(plot, chart)] },
  });
  addTip(chart, charts);
  return chart;
}

// What tells workers apart: without what all of them begin with.
function shortName(lanes, row) {
  const names = lanes.map((lane) => lane.worker);
  const first = names[0] || "", name = names[row] || "";
  let common = 0;
  while (names.length > 1 && common < first.length && names.every((one) => one[common] === first[common])) common += 1;
  common = Math.max(first.lastIndexOf("-", common - 1), first.lastIndexOf("/", common - 1)) + 1;
  const rest = name.slice(common);
  return rest.length > 10 ? `…${rest.slice(-9)}` : rest;
}

function drawLanes(plot, chart) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  const x = (moment) => plot.valToPos(moment, "x", true), y = (row) => plot.valToPos(row, "y", true);
  const row = y(1) - y(0), gap = row > 8 * ratio ? 3 * ratio : row > 4 * ratio ? ratio : 0;
  const colors = Object.fromEntries(["warming", "training", "slow", "leaving", "lost", "left", "panel", "text"].map((name) => [name, color(name)]));
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const { min, max } = plot.scales.x;
  const changes = chart.changes.filter((one) => one.before && one.pause_s && one.time >= min && one.time - one.pause_s <= max);
  const hatch = stripes(ctx, colors.slow, colors.panel, ratio);
  chart.lanes.forEach((lane, index) => {
    const top = y(index) + gap / 2, height = Math.max(row - gap, 1);
    for (const [state, begin, end] of lane.spans) {
      const left = x(begin), width = Math.max(x(end) - left, ratio);
      if (left > bbox.left + bbox.width || left + width < bbox.left) continue;
      const thin = state === "warming" || state === "leaving";
      ctx.fillStyle = state === "slow" ? hatch : colors[state];
      ctx.fillRect(left, thin ? top + height / 3 : top, width, thin ? Math.max(height / 3, 1) : height);
    }
    drawPauses(ctx, lane, changes, x, top, height, colors.panel, changes.length <= FEW ? ratio : 0);
    if (lane.spans.length && (lane.how === "lost" || lane.how === "left")) drawEnd(ctx, lane, x, top, height, colors, ratio);
  });
  ctx.fillStyle = colors.text;
  for (const { time } of chart.checkpoints) {
    const middle = x(time), height = bbox.top + 8 * ratio, size = 4 * ratio;
    ctx.beginPath();
    ctx.moveTo(middle, height - size); ctx.lineTo(middle + size, height);
    ctx.lineTo(middle, height + size); ctx.lineTo(middle - size, height);
    ctx.fill();
  }
  ctx.restore();
}

// At least so wide, that the pauses of a few changes are seen however short they are.
function drawPauses(ctx, lane, changes, x, top, height, background, least) {
  ctx.fillStyle = background;
  for (const { time, pause_s: pause } of changes) {
    const width = Math.max(x(time) - x(time - pause), least);
    if (width < 0.5) continue;
    const trained = lane.spans.some(([state, begin, end]) => state !== "warming" && begin <= time - pause && end > time);
    if (trained) ctx.fillRect(x(time - pause), top, width, height);
  }
}

function drawEnd(ctx, lane, x, top, height, colors, ratio) {
  const at = x(lane.spans.at(-1)[2]);
  if (lane.how === "left" || height < 8 * ratio) {
    ctx.fillStyle = colors[lane.how];
    ctx.fillRect(at - ratio, top, 3 * ratio, height);
    return;
  }
  const size = Math.min(height / 2 - ratio, 6 * ratio), middle = top + height / 2;
  ctx.lineCap = "round";
  for (const [width, stroke] of [[5, colors.panel], [2.5, colors.lost]]) {
    ctx.strokeStyle = stroke;
    ctx.lineWidth = width * ratio;
    ctx.beginPath();
    ctx.moveTo(at - size, middle - size); ctx.lineTo(at + size, middle + size);
    ctx.moveTo(at - size, middle + size); ctx.lineTo(at + size, middle - size);
    ctx.stroke();
  }
}

function stripes(ctx, front, back, ratio) {
  const tile = document.createElement("canvas"), size = Math.round(6 * ratio);
  tile.width = tile.height = size;
  const brush = tile.getContext("2d");
  brush.fillStyle = front;
  brush.fillRect(0, 0, size, size);
  brush.strokeStyle = back;
  brush.lineWidth = 1.5 * ratio;
  brush.beginPath();
  for (const shift of [-size, 0, size]) { brush.moveTo(shift, size); brush.lineTo(shift + size, 0); }
  brush.stroke();
  return ctx.createPattern(tile, "repeat");
}

function addTip(chart, charts) {
  const tip = element("div", { class: "tip", hidden: true });
  chart.box.append(tip);
  const over = chart.plot.over;
  over.addEventListener("mouseleave", () => { tip.hidden = true; });
  over.addEventListener("mousemove", (event) => {
    const row = Math.floor(chart.plot.posToVal(event.offsetY, "y"));
    const text = row < 0 ? checkpointAt(chart, event.offsetX) : laneAt(chart.lanes[row], chart.plot.posToVal(event.offsetX, "x"));
    tip.hidden = !text;
    tip.textContent = text;
    if (!text) return;
    const left = over.offsetLeft + event.offsetX + 14, width = tip.offsetWidth;
    tip.style.left = `${left + width > charts.width ? Math.max(left - width - 28, 0) : left}px`;
    tip.style.top = `${over.offsetTop + event.offsetY + 34}px`;
  });
}

function laneAt(lane, moment) {
  if (!lane) return "";
  const span = lane.spans.find(([, begin, end]) => begin <= moment && moment < end);
  const last = lane.spans.at(-1);
  const lines = [lane.worker, `${lane.host || "unknown host"}, process ${lane.pid || "unknown"}`];
  if (span) lines.push(`${span[0]} from ${clock(span[1], 0.1)} to ${clock(span[2], 0.1)} (${duration(span[2] - span[1])})`);
  if (lane.how && last) lines.push(`${ENDS[lane.how]}${lane.why ? ` (${lane.why})` : ""}, at ${clock(last[2], 0.1)}`);
  return lines.join("\n");
}

function checkpointAt(chart, left) {
  const near = chart.checkpoints.find((one) => Math.abs(chart.plot.valToPos(one.time, "x") - left) < 6);
  return near ? `Checkpoint at step ${count(near.step)}\n${bytes(near.bytes)} in ${duration(near.seconds)}, at ${clock(near.time, 0.1)}` : "";
}

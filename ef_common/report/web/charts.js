// Charts that share one axis of time: a cursor in one is a cursor in all, and so is a zoom.

const GUTTER = 72;
const INCREMENTS = [
  ...[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30],
  ...[60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800],
];
const TONES = { lost: "lost", joined: "joined", left: "left", rebuilt: "left", ended: "left" };

class Charts {
  constructor(place) {
    this.place = place;
    this.all = [];
    this.marks = [];
    this.full = [0, 1];
    this.range = null; // null: all of the run
    this.onRange = () => {};
    new ResizeObserver(() => this.resize()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    addEventListener("beforeprint", () => this.resize());
    place.addEventListener("keydown", (event) => this.press(event));
  }

  get width() { return Math.max(this.place.clientWidth, 200); }

  add(chart, { title, height, series, axes = {}, scale = {}, hooks = {}, labels = false, read, bands }) {
    const value = element("span", { class: "value" });
    const box = element("div", { class: "chart" }, element("div", { class: "title" }, element("span", {}, title), value));
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", title);
    this.place.append(box);
    Object.assign(chart, { box, height, read });
    const options = {
      width: this.width,
      height: height + (labels ? 30 : 10),
      padding: [8, 24, labels ? 0 : 4, 0],
      legend: { show: false },
      scales: { x: { time: false, range: () => this.range || this.full }, y: scale },
      series: [{}, ...series],
      bands: bands || [],
      axes: [
        {
          show: true,
          size: labels ? 24 : 0,
          incrs: INCREMENTS,
          space: 70,
          stroke: () => color("muted"),
          font: "11px system-ui, sans-serif",
          grid: { stroke: () => color("grid"), width: 1 },
          ticks: { show: labels, stroke: () => color("line"), size: 4 },
          values: (_, splits, __, ___, step) => splits.map((split) => (labels ? clock(split, step) : "")),
        },
        {
          size: GUTTER,
          space: 20,
          stroke: () => color("muted"),
          font: "11px system-ui, sans-serif",
          grid: { stroke: () => color("grid"), width: 1 },
          ticks: { show: false },
          values: (_, splits) => splits.map(brief),
          ...axes,
        },
      ],
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false },
        sync: { key: "run", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => this.show(null) },
      },
      hooks: {
        drawClear: hooks.drawClear || [],
        draw: [(plot) => this.drawMarks(plot), ...(hooks.draw || [])],
        setCursor: [(plot) => { value.textContent = chart.read ? this.reading(plot, chart) : ""; }],
        setSelect: [(plot) => this.select(plot)],
      },
    };
    chart.plot = new uPlot(options, chart.data, box);
    this.all.push(chart);
    return chart;
  }

  reading(plot, chart) {
    if (plot.cursor.left < 0) return "";
    const moment = plot.posToVal(plot.cursor.left, "x");
    const [low, high] = this.range || this.full;
    const text = chart.read(moment);
    return text && `${text} at ${clock(moment, (high - low) / this.width)}`;
  }

  select(plot) {
    if (plot.select.width < 3) return;
    const [low, high] = [plot.select.left, plot.select.left + plot.select.width].map((left) => plot.posToVal(left, "x"));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.show([low, high]);
  }

  show(range) {
    if (range !== null) {
      const least = 0.01, [low, high] = this.full;
      const width = Math.min(Math.max(range[1] - range[0], least), high - low);
      const begin = Math.min(Math.max(range[0], low), high - width);
      range = width >= high - low ? null : [begin, begin + width];
    }
    this.range = range;
    this.redraw();
    this.onRange(range);
  }

  press(event) {
    const [low, high] = this.range || this.full, width = high - low, middle = (low + high) / 2;
    const moves = {
      "+": [middle - width / 4, middle + width / 4],
      "=": [middle - width / 4, middle + width / 4],
      "-": [middle - width, middle + width],
      ArrowLeft: [low - width / 5, high - width / 5],
      ArrowRight: [low + width / 5, high + width / 5],
    };
    if (event.key === "0" || event.key === "Escape") this.show(null);
    else if (moves[event.key] && !event.ctrlKey && !event.metaKey) this.show(moves[event.key]);
    else return;
    event.preventDefault();
  }

  redraw() {
    for (const { plot } of this.all) {
      const [min, max] = this.range || this.full;
      plot.batch(() => { plot.setScale("x", { min, max }); plot.redraw(true, true); });
    }
  }

  resize() {
    for (const { plot } of this.all) if (plot.width !== this.width) plot.setSize({ width: this.width, height: plot.height });
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const shown = this.marks.filter(({ time }) => time >= plot.scales.x.min && time <= plot.scales.x.max);
    ctx.globalAlpha = shown.length > 60 ? 0.35 : 0.8;
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    for (const { time, tone } of shown) {
      const x = Math.round(plot.valToPos(time, "x", true));
      ctx.strokeStyle = color(TONES[tone]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

// ------------------------------------------------------------------------------------------------ each of them

const soft = (name) => `color-mix(in srgb, ${color(name)} 18%, transparent)`;

const upTo = (least) => ({ range: (_, __, max) => [0, Math.max(max === null ? 0 : max * 1.12, least)] });

// A value that holds until the next one: the last one until now.
function held([times, values], now) {
  return times.length ? [[...times, Math.max(now, times.at(-1))], [...values, values.at(-1)]] : [[], []];
}

function addLevels(charts, title, unit, { least = 1, height = 76, whole = false } = {}) {
  const chart = { data: [[], []] };
  chart.update = (columns, now) => { chart.data = held(columns, now); chart.plot.setData(chart.data, false); };
  return charts.add(chart, {
    title,
    height,
    series: [{
      stroke: () => color("training"),
      fill: () => soft("training"),
      width: 1.5,
      paths: uPlot.paths.stepped({ align: 1 }),
      points: { show: false },
    }],
    scale: { range: () => [0, Math.max(...chart.data[1], least) * 1.15] },
    axes: whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9] } : {},
    read: (moment) => {
      const index = floorIndex(chart.data[0], moment);
      return index < 0 || moment > chart.data[0].at(-1) ? "" : `${whole ? count(chart.data[1][index]) : brief(chart.data[1][index])} ${unit(chart.data[1][index])}`;
    },
  });
}

function bucketTimes(series, values) {
  return values.map((_, index) => (index + 0.5) * series.bucket_s);
}

// The value of a moment; where nothing happened in its bucket, that of the nearest one within a few pixels.
function bucketAt(charts, chart, values, moment) {
  const [low, high] = charts.range || charts.full;
  const index = Math.floor(moment / chart.bucket_s);
  const farthest = Math.ceil((6 * (high - low)) / charts.width / chart.bucket_s);
  for (let distance = 0; distance <= Math.min(farthest, 50); distance += 1) {
    for (const place of [index - distance, index + distance]) {
      if (values[place] !== null && values[place] !== undefined) return values[place];
    }
  }
  return null;
}

function addSpeed(charts) {
  const chart = { data: [[], []] };
  chart.update = (series) => {
    chart.bucket_s = series.bucket_s;
    chart.data = [bucketTimes(series, series.samples_per_s), series.samples_per_s];
    chart.plot.setData(chart.data, false);
  };
  return charts.add(chart, {
    title: "Samples per second, of all workers",
    height: 110,
    series: [{ stroke: () => color("training"), fill: () => soft("training"), width: 1.5, points: { show: false } }],
    scale: upTo(1),
    read: (moment) => {
      const value = bucketAt(charts, chart, chart.data[1], moment);
      return value === null ? "" : `${count(value)} samples/s`;
    },
  });
}

function addLoss(charts) {
  const chart = { data: [[], [], [], []] };
  chart.update = (series) => {
    chart.bucket_s = series.bucket_s;
    chart.data = [bucketTimes(series, series.loss), series.loss, series.loss_max, series.loss_min];
    chart.plot.setData(chart.data, false);
  };
  const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
  return charts.add(chart, {
    title: "Loss: mean over workers, with the smallest and the largest",
    height: 110,
    series: [{ stroke: () => color("training"), width: 1.5, spanGaps: true, points: { show: false } }, edge, edge],
    bands: [{ series: [2, 3], fill: () => soft("training") }],
    read: (moment) => {
      const [mean, max, min] = chart.data.slice(1).map((values) => bucketAt(charts, chart, values, moment));
      return mean === null ? "" : `${brief(mean)} (${brief(min)} to ${brief(max)})`;
    },
  });
}

function addPauses(charts) {
  const chart = { data: [[], []] };
  chart.update = (changes) => {
    chart.changes = changes.filter((one) => one.before > 0 && one.tone !== "ended");
    chart.data = [chart.changes.map((one) => one.time), chart.changes.map((one) => one.pause_s)];
    chart.plot.setData(chart.data, false);
  };
  const stems = (plot) => {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, base = bbox.top + bbox.height;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const change of chart.changes || []) {
      const x = Math.round(plot.valToPos(change.time, "x", true)), y = plot.valToPos(change.pause_s, "y", true);
      ctx.fillStyle = color(TONES[change.tone]);
      ctx.fillRect(x - 1.5 * ratio, y, 3 * ratio, base - y);
      ctx.beginPath();
      ctx.arc(x, y, 3.5 * ratio, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.restore();
  };
  return charts.add(chart, {
    title: "Cost of each change: pause of the training",
    height: 84,
    labels: true,
    series: [{ paths: () => null, points: { show: false } }],
    scale: { range: () => [0, Math.max(...chart.data[1], 0.01) * 1.2] },
    axes: { values: (_, splits) => splits.map((split) => (split === 0 ? "0" : duration(split))) },
    hooks: { draw: [stems] },
    read: (moment) => {
      const [low, high] = charts.range || charts.full;
      const near = (chart.changes || []).filter((one) => Math.abs(one.time - moment) < (high - low) / 80);
      if (!near.length) return "";
      const one = near.reduce((a, b) => (Math.abs(a.time - moment) < Math.abs(b.time - moment) ? a : b));
      return `${duration(one.pause_s)}: ${one.text}`;
    },
  });
}

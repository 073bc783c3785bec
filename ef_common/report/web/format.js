"use strict";

// Numbers and moments as people read them, and elements without markup: text never becomes HTML.

const pad = (number) => String(number).padStart(2, "0");

const count = (number) => (number === null ? "–" : Math.round(number).toLocaleString("en-US"));

function brief(number) {
  if (number === null || number === undefined) return "–";
  if (Math.abs(number) >= 1e6) return `${+(number / 1e6).toPrecision(3)} M`;
  if (Math.abs(number) >= 1e4) return `${+(number / 1e3).toPrecision(3)} k`;
  return String(+number.toPrecision(4));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${pad(Math.floor(seconds % 60))} s`;
  return `${Math.floor(seconds / 3600)} h ${pad(Math.floor((seconds % 3600) / 60))} min`;
}

// A moment of the run: digits behind the point only where neighbours are that close.
function clock(seconds, step = 1) {
  const digits = step >= 1 ? 0 : Math.min(Math.ceil(-Math.log10(step)), 3);
  const rounded = Number(Math.abs(seconds).toFixed(digits));
  const sign = seconds < 0 && rounded > 0 ? "−" : "";
  if (rounded < 60) return `${sign}${rounded.toFixed(digits)} s`;
  const hours = Math.floor(rounded / 3600), minutes = Math.floor((rounded % 3600) / 60);
  const rest = (rounded % 60).toFixed(digits).padStart(digits ? 3 + digits : 2, "0");
  return hours ? `${sign}${hours}:${pad(minutes)}:${rest}` : `${sign}${minutes}:${rest}`;
}

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${unit ? number.toFixed(1) : number} ${units[unit]}`;
}

const percent = (part) => (part === null ? "–" : `${(100 * part).toFixed(1)} %`);

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key === "on") for (const [type, listener] of Object.entries(value)) made.addEventListener(type, listener);
    else if (key === "color") made.style.background = `var(--${value})`;
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const byId = (id) => document.getElementById(id);

// The place of the last value that is not greater; -1 if all are.
function floorIndex(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

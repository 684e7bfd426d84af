"use strict";
// What is in the page, and how it is unpacked. Everything that came from a dump reaches the page as text nodes only.
const report = JSON.parse(document.getElementById("data").textContent);
const KINDS = report.kinds;

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

// A missing value is a dash, never a 0.
function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  const text = size >= 1e-4 && size < 1e6 ? String(Number(value.toPrecision(digits))) : value.toExponential(digits - 1);
  return text.replace(/-/g, "−");
}

// Blocks stand behind the scripts, so that the first paint does not wait for them.
async function unpacked(id) {
  if (document.readyState === "loading" && !document.getElementById(id)) {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  }
  const block = document.getElementById(id);
  if (!block || !block.textContent) return null;
  const packed = Uint8Array.from(atob(block.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpackedJson(id) {
  const buffer = await unpacked(id);
  return buffer === null ? null : JSON.parse(new TextDecoder().decode(buffer));
}

function fromHalf(bits) {
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const exponent = (bits[i] >> 10) & 31, fraction = bits[i] & 1023, sign = bits[i] & 32768 ? -1 : 1;
    if (exponent === 31) values[i] = fraction ? NaN : sign * Infinity;
    else values[i] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction * 2 ** -24);
  }
  return values;
}

const ARRAYS = {
  float32: (buffer, at, n) => new Float32Array(buffer, at, n),
  float16: (buffer, at, n) => fromHalf(new Uint16Array(buffer, at, n)),
  int32: (buffer, at, n) => new Int32Array(buffer, at, n),
  uint8: (buffer, at, n) => new Uint8Array(buffer, at, n),
};

// The tokens of one sample; null where the page does not hold them.
async function tokensOf(rollout, position) {
  const buffer = await unpacked(`t-${rollout}-${position}`);
  if (buffer === null) return null;
  const headLength = new DataView(buffer).getUint32(0, true);
  const sample = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headLength)));
  for (const [name, [kind, at, n]] of Object.entries(sample.arrays)) {
    sample[name] = ARRAYS[kind](buffer, 4 + headLength + at, n);
  }
  sample.exact = Boolean(sample.train);
  if (!sample.train) sample.train = sample.rollout.map((value, i) => value + sample.delta[i]);
  if (!sample.delta) sample.delta = sample.rollout.map((value, i) => sample.train[i] - value);
  sample.masked = sample.kind.map((value) => (value & 128 ? 0 : 1));
  sample.kind = sample.kind.map((value) => value & 127);
  // Only what counts in the metrics is ranked.
  sample.worst = Array.from(sample.kind.keys())
    .filter((i) => sample.kind[i] === 0 && sample.delta[i] !== 0)
    .sort((a, b) => Math.abs(sample.delta[b]) - Math.abs(sample.delta[a]) || a - b);
  sample.rank = new Map(sample.worst.map((token, place) => [token, place]));
  return sample;
}

function advantageOf(sample, i) {
  if (sample.advantage) return sample.advantage[i];
  return sample.constants.advantage === undefined ? null : sample.constants.advantage;
}

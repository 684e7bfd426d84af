// One sample: its tokens, coloured; hover, keys and pages.
const PAGE = 2000; // tokens in the document at a time
const LEVELS = { delta: [0.01, 0.05, 0.2, 1], relative: [0.1, 0.25, 0.5, 0.75] };
let open = null; // {rollout, row, sample, token}
let words = null;

function levelOf(value, limits) {
  return limits.filter((limit) => value >= limit).length;
}

function classOf(sample, i, mode, scale) {
  let group = "", level = 0;
  if (mode === "delta" || mode === "relative") {
    if (sample.kind[i] === 0) {
      const size = Math.abs(sample.delta[i]) / (mode === "relative" ? scale.delta || 1 : 1);
      group = sample.delta[i] >= 0 ? "pos" : "neg";
      level = levelOf(size, LEVELS[mode]);
    }
  } else if (mode === "advantage") {
    const value = advantageOf(sample, i);
    if (Number.isFinite(value) && value !== null && value !== 0) {
      group = value > 0 ? "pos" : "neg";
      level = Math.max(1, levelOf(Math.abs(value) / (scale.advantage || 1), LEVELS.relative));
    }
  } else if (mode === "mask") {
    group = "seq";
    level = sample.masked[i] ? 0 : 2;
  } else {
    const chance = Math.exp(sample[mode][i]);
    group = "seq";
    level = Number.isNaN(chance) ? 0 : levelOf(1 - chance, [0.1, 0.5, 0.9, 0.99]);
  }
  return ["tok", level ? `${group} l${level}` : "", sample.masked[i] ? "masked" : "",
    [2, 3, 4, 5].includes(sample.kind[i]) ? "gone" : ""].filter(Boolean).join(" ");
}

const LEGENDS = {
  delta: [["pos l1", "0.01"], ["pos l2", "0.05"], ["pos l3", "0.2"], ["pos l4", "1 nat or more: training finds it more probable (line above)"], ["neg l4", "less probable (line below)"]],
  relative: [["pos l1", "10 %"], ["pos l2", "25 %"], ["pos l3", "50 %"], ["pos l4", "75 % of the largest |δ| here (line above: training finds it more probable)"], ["neg l4", "less probable"]],
  advantage: [["pos l3", "above 0"], ["neg l3", "below 0"]],
  mask: [["seq l2", "trained"], ["masked", "masked, not trained"]],
  rollout: [["seq l1", "below 90 %"], ["seq l2", "below 50 %"], ["seq l3", "below 10 %"], ["seq l4", "below 1 %"]],
};
LEGENDS.train = LEGENDS.rollout;

function textOf(sample, i) {
  if (document.getElementById("show").value === "value") return sample.kind[i] === 0 ? number(sample.delta[i], 2) : "–";
  if (!sample.ids) return "·";
  const word = words && words[sample.ids[i]];
  return word === undefined || word === null ? String(sample.ids[i]) : word.replace(/\n/g, "↵\n").replace(/\t/g, "⇥").replace(/^$/, "∅");
}

function describe(sample, i) {
  const approximately = sample.exact ? "" : "≈ ";
  const rows = [["token", number(sample.first + i)]];
  if (sample.ids) rows.push(["id", String(sample.ids[i])]);
  if (words && sample.ids && words[sample.ids[i]] !== undefined) rows.push(["text", JSON.stringify(words[sample.ids[i]])]);
  const value = (given) => (sample.kind[i] === KINDS.indexOf("missing") && Number.isNaN(given) ? "missing" : approximately + number(given, 5));
  rows.push(["log μ", value(sample.rollout[i])], ["log π", value(sample.train[i])]);
  rows.push(["δ", Number.isNaN(sample.delta[i]) ? "–" : approximately + number(sample.delta[i], 4)]);
  rows.push(["advantage", number(advantageOf(sample, i), 4)], ["mask", sample.masked[i] ? "0, not trained" : "1"]);
  const turn = sample.turns.filter((start) => start <= sample.first + i).length;
  if (sample.turns.length > 1 && !sample.masked[i]) rows.push(["turn", String(turn)]);
  const chunk = sample.chunks.filter(([start]) => start <= sample.first + i).pop();
  if (chunk) rows.push(["CP rank", String(chunk[1])]);
  if (sample.kind[i] !== 0) rows.push(["not compared", KINDS[sample.kind[i]]]);
  if (sample.rank.has(i)) rows.push(["rank", `${sample.rank.get(i) + 1} of ${sample.worst.length}`]);
  return rows;
}

function drawTokens() {
  const { sample } = open;
  const box = document.getElementById("tokens"), mode = document.getElementById("colour").value;
  const scale = { delta: sample.worst.length ? Math.abs(sample.delta[sample.worst[0]]) : 0, advantage: 0 };
  for (let i = 0; i < sample.n; i++) {
    const size = Math.abs(advantageOf(sample, i) || 0);
    if (Number.isFinite(size) && size > scale.advantage) scale.advantage = size;
  }
  const page = Math.floor(Math.max(open.token ?? 0, 0) / PAGE), from = page * PAGE, to = Math.min(from + PAGE, sample.n);
  const chunks = new Map(sample.chunks.map(([at, rank]) => [at, rank])), turns = new Map(sample.turns.map((at, i) => [at, i + 1]));
  const pieces = [];
  for (let i = from; i < to; i++) {
    const at = sample.first + i;
    if (chunks.has(at)) pieces.push(element("span", { class: "edge", title: `from here on context-parallel rank ${chunks.get(at)}` }, `CP${chunks.get(at)}`));
    if (turns.has(at) && sample.turns.length > 1) pieces.push(element("span", { class: "edge turn", title: `turn ${turns.get(at)} begins` }, `turn ${turns.get(at)}`));
    pieces.push(element("span", { class: classOf(sample, i, mode, scale), "data-i": i }, textOf(sample, i)), document.createElement("wbr"));
  }
  box.replaceChildren(...(pieces.length ? pieces : ["This response has no tokens."]));
  open.page = page;
  drawPager(page);
  const legend = LEGENDS[mode].map(([name, text]) => element("span", {}, element("span", { class: `tok ${name}` }, "\u00a0\u00a0"), ` ${text}`));
  document.getElementById("legend").replaceChildren(...legend);
  markToken(false);
}

function drawPager(page) {
  const pages = Math.ceil(open.sample.n / PAGE), box = document.getElementById("pager");
  box.hidden = pages < 2;
  const turnTo = (wanted) => element("button", { type: "button", onclick: () => selectToken(wanted * PAGE), ...(wanted < 0 || wanted >= pages ? { disabled: "" } : {}) }, wanted < page ? "Earlier tokens" : "Later tokens");
  const last = Math.min((page + 1) * PAGE, open.sample.n) - 1;
  box.replaceChildren(turnTo(page - 1), element("span", { class: "quiet" }, `tokens ${number(open.sample.first + page * PAGE)} to ${number(open.sample.first + last)} of ${number(open.sample.total)}`), turnTo(page + 1));
}

function markToken(scroll) {
  const box = document.getElementById("tokens");
  box.querySelectorAll(".now").forEach((one) => one.classList.remove("now"));
  const detail = document.getElementById("detail");
  if (open.token === null || open.token === undefined || !open.sample.n) {
    detail.replaceChildren(element("span", { class: "quiet" }, "Point at a token to see its values, or press n for the worst one."));
    return;
  }
  const one = box.querySelector(`[data-i="${open.token}"]`);
  if (one) {
    one.classList.add("now");
    if (scroll) box.scrollTop += one.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
  }
  detail.replaceChildren(...describe(open.sample, open.token).map(([name, value]) => element("span", { class: "pair" }, element("span", { class: "quiet" }, `${name} `), element("b", {}, value))));
}

function selectToken(token) {
  if (!open || !open.sample || !open.sample.n) return;
  open.token = Math.min(Math.max(token, 0), open.sample.n - 1);
  if (Math.floor(open.token / PAGE) !== open.page) drawTokens();
  markToken(true);
  writeHash();
}

function stepWorst(by) {
  if (!open || !open.sample || !open.sample.worst.length) return;
  const at = open.sample.rank.get(open.token);
  const next = at === undefined ? 0 : Math.min(Math.max(at + by, 0), open.sample.worst.length - 1);
  selectToken(open.sample.worst[next]);
}

function drawTexts(sample) {
  const parts = ["prompt", "response", "label", "metadata"].filter((name) => sample.texts[name] !== undefined);
  document.getElementById("texts").replaceChildren(...parts.map((name) =>
    element("details", {}, element("summary", {}, `${name[0].toUpperCase()}${name.slice(1)}, as the rollout dump has it`), element("pre", {}, sample.texts[name]))));
}

const tip = document.getElementById("tip");
document.getElementById("tokens").addEventListener("mouseover", (event) => {
  const one = event.target.closest(".tok");
  if (!one) { tip.hidden = true; return; }
  tip.textContent = describe(open.sample, Number(one.dataset.i)).map(([name, value]) => `${name}: ${value}`).join("\n");
  tip.hidden = false;
  const place = one.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 8)) + scrollX}px`;
  const below = place.bottom + tip.offsetHeight + 10 < innerHeight;
  tip.style.top = `${(below ? place.bottom + 6 : place.top - tip.offsetHeight - 6) + scrollY}px`;
});
document.getElementById("tokens").addEventListener("mouseleave", () => { tip.hidden = true; });
document.getElementById("tokens").addEventListener("click", (event) => {
  const one = event.target.closest(".tok");
  if (one) selectToken(Number(one.dataset.i));
});

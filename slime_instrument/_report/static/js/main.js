// State of the page: rollout, sample, token. The address holds it, so that a link reopens the same view.
const view = { rollout: 0, rows: [], order: [] };
const $ = (id) => document.getElementById(id);

function writeHash() {
  const parts = [`r=${view.rollout}`];
  if (open) parts.push(`s=${open.row.position}`);
  if (open && open.token !== null && open.token !== undefined && open.sample) parts.push(`t=${open.sample.first + open.token}`);
  const colouring = $("colour").value;
  if (colouring !== "delta") parts.push(`c=${colouring}`);
  const hash = `#${parts.join("&")}`;
  try { history.replaceState(null, "", hash); } catch { location.hash = hash; }
}

function readHash() {
  const given = Object.fromEntries(location.hash.slice(1).split("&").map((part) => part.split("=")));
  const whole = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);
  return { rollout: whole(given.r), sample: whole(given.s), token: whole(given.t), colour: given.c };
}

async function showRollout(i) {
  const one = report.rollouts[i];
  view.rollout = i;
  closeSample();
  $("rollout").value = String(i);
  if (report.rollouts.length > 1) {
    drawTrend((picked) => showRollout(picked), i);
    const answers = element("dl", {}, ...one.verdict.answers.map(([question, answer, link]) => element("div", {}, element("dt", {}, question),
      element("dd", {}, answer, ...(link ? [" ", element("a", { href: link.replace("r=0", `r=${i}`) }, "Show it")] : [])))));
    $("one").className = `verdict ${one.verdict.level}`;
    $("one").replaceChildren(element("h2", {}, element("span", { class: "mark", "aria-hidden": "true" }, report.marks[one.verdict.level]), `${one.name}: ${one.verdict.text}`), answers);
    $("one").hidden = false;
  }
  drawNumbers(one);
  drawFindings(one);
  drawOrigin(one);
  drawRollout(one);
  const rows = (await unpackedJson(`rows-${i}`)) || [];
  if (view.rollout !== i) return;
  view.rows = rows.map((cells, key) => ({ key, ...Object.fromEntries(report.columns.map((name, k) => [name, cells[k]])) }));
  view.rows.forEach((row) => { row.findings = row.findings.join(", "); row.left_out = reason(row.left_out); });
  const held = new Set(report.held[i]);
  view.order = view.rows.filter((row) => row.max_abs !== null && held.has(row.position)).sort((a, b) => b.max_abs - a.max_abs);
  await drawTable(view.rows, (row) => openSample(row), () => (open ? open.row.key : null));
  writeHash();
}

function drawNumbers(one) {
  const cards = [
    ["mean |δ|", one.abs_diff.mean, "nats, over all compared tokens"],
    ["99 % of tokens below", one.abs_diff.p99, "|δ| in nats"],
    ["largest |δ|", one.abs_diff.max, "nats, one token"],
    ["KL estimate (k3)", one.k3, "nats per token, rollout to training"],
    ["effective samples", one.ess === null ? null : one.ess, "share left after importance weighting; 1 is best"],
    ["probability correlation", one.prob_diff.pearson, "of rollout and training; 1 is best"],
    ["samples joined", one.n_joined, `of ${number(one.n_rollout)} in the rollout dump`],
    ["tokens compared", one.n_tokens, Object.entries(one.excluded).filter(([, n]) => n).map(([kind, n]) => (kind === "removed" ? `${number(n)} samples removed` : `${number(n)} ${kind}`)).join(", ") || "none left out"],
  ];
  $("numbers").replaceChildren(...cards.map(([title, value, note]) => element("div", { class: "number" }, element("span", {}, title), element("b", {}, number(value, 4)), element("span", {}, note))));
}

function drawFindings(one) {
  $("findings").replaceChildren(...one.findings.map((finding) => {
    const links = finding.samples.slice(0, 12).map((position) => element("button", { type: "button", onclick: () => openPosition(position) }, String(position)));
    const rest = finding.n_samples > links.length ? [element("span", { class: "quiet" }, `and ${number(finding.n_samples - links.length)} more; filter the table for it`)] : [];
    return element("div", { class: "finding buttons" }, element("code", {}, finding.code), element("span", { class: "quiet" }, links.length ? "Samples" : "concerns no single sample"), ...links, ...rest);
  }));
}

function drawOrigin(one) {
  const from = one.provenance || {};
  const sizes = [["TP", "tensor_parallel"], ["PP", "pipeline_parallel"], ["CP", "context_parallel"], ["DP", "data_parallel"]].filter(([, key]) => from[key]).map(([name, key]) => `${name}${from[key]}`).join(" ");
  const left = Object.entries(one.unmatched).map(([code, n]) => `${number(n)}: ${reason(code)}`).join("; ");
  const facts = [
    ["Rollout dump", one.rollout], ["Train dump", one.train.join(", ")], ["Layout", sizes || "not stated in the file"],
    ["Versions", ["slime", "slime_instrument", "torch", "megatron_core"].filter((key) => from[key]).map((key) => `${key} ${from[key]}`).join(", ") || "not stated in the file"],
    ["Train log-probs", one.log_probs.origin ? { captured: "of the training forward itself", recomputed: "recomputed before the training steps", rollout: "came with the rollout" }[one.log_probs.origin] || one.log_probs.origin : "origin not stated in the file"],
    ["Coverage", `${number(one.n_joined)} of ${number(one.n_rollout)} rollout samples joined${left ? `; not compared: ${left}` : ""}`],
    ...one.warnings.map((text) => ["Warning", text]),
  ];
  $("origin-body").replaceChildren(element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
}

function closeSample() {
  open = null;
  $("sample").hidden = true;
}

async function openPosition(position, token) {
  const row = view.rows.find((one) => one.position === position);
  if (row) await openSample(row, token);
}

async function openSample(row, token) {
  const wanted = { row, rollout: view.rollout, sample: null, token: null };
  open = wanted;
  const box = $("sample");
  box.hidden = false;
  $("sample-title").textContent = `Sample ${row.position ?? "without a place in the rollout"}`;
  let sample = null, trouble = "";
  try { sample = row.position === null ? null : await tokensOf(view.rollout, row.position); }
  catch (error) { trouble = typeof DecompressionStream === "undefined" ? "This browser cannot unpack the tokens; Chrome 80, Firefox 113, Safari 16.4 or later can." : `The tokens cannot be read: ${error.message}`; }
  if (open !== wanted) return;
  open.sample = sample;
  const facts = [row.status, row.reward !== null ? `reward ${number(row.reward)}` : row.reward_text, `${number(row.response_length)} response tokens`,
    sample && sample.prompt_length !== null ? `${number(sample.prompt_length)} prompt tokens` : "", row.mean_abs !== null ? `mean |δ| ${number(row.mean_abs)}, largest ${number(row.max_abs)}` : "no comparable token",
    row.advantage !== null ? `advantage ${number(row.advantage)}` : "", row.left_out ? `not compared: ${row.left_out}` : "", sample && sample.n < sample.total ? `only ${number(sample.n)} tokens around the worst one are in this file` : ""];
  $("sample-facts").textContent = facts.filter(Boolean).join(" · ");
  for (const id of ["profile", "detail", "tokens", "texts"]) $(id).hidden = !sample;
  $("pager").hidden = true;
  if (!sample) $("sample-facts").textContent += ` · ${trouble || (row.left_out && !["removed", "masked", "no-response", "no-log-probs"].some((code) => row.left_out === REASONS[code]) ? "its tokens were not compared" : "its tokens are not in this file, to keep it small")}`;
  else {
    drawProfile(sample, selectToken);
    drawTexts(sample);
    open.token = token === undefined || token === null ? sample.worst[0] ?? null : token - sample.first;
    if (open.token !== null) open.token = Math.min(Math.max(open.token, 0), Math.max(sample.n - 1, 0));
    drawTokens();
    markToken(true);
  }
  markChosen();
  writeHash();
  box.scrollIntoView({ block: "start" });
}

function stepSample(by) {
  if (!view.order.length) return;
  const at = open ? view.order.findIndex((row) => row.key === open.row.key) : -1;
  openSample(view.order[at < 0 ? 0 : Math.min(Math.max(at + by, 0), view.order.length - 1)]);
}

function applyTheme(choice) {
  const now = choice === "system" ? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light") : choice;
  document.documentElement.dataset.theme = document.documentElement.dataset.now = now;
  $("theme").textContent = `Theme: ${choice}`;
  $("theme").dataset.choice = choice;
}

function redraw() {
  if (!report.rollouts.length) return;
  if (report.rollouts.length > 1) drawTrend((picked) => showRollout(picked), view.rollout);
  if (report.sweep) drawSweep(report.sweep);
  drawRollout(report.rollouts[view.rollout]);
  if (open && open.sample) drawProfile(open.sample, selectToken);
}

$("theme").addEventListener("click", () => {
  const next = { system: "light", light: "dark", dark: "system" }[$("theme").dataset.choice];
  try { localStorage.setItem("slime-instrument-theme", next); } catch { /* no storage from disk in some browsers */ }
  applyTheme(next);
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme($("theme").dataset.choice); redraw(); });
addEventListener("beforeprint", () => { view.themed = $("theme").dataset.choice; applyTheme("light"); redraw(); });
addEventListener("afterprint", () => { applyTheme(view.themed); redraw(); });
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => drawn.forEach((chart) => chart.resize()), 120); });
addEventListener("hashchange", () => { if (location.hash.includes("=")) restore(readHash()); });
$("rollout").addEventListener("change", () => showRollout(Number($("rollout").value)));
$("colour").addEventListener("change", () => { if (open && open.sample) drawTokens(); writeHash(); });
$("show").addEventListener("change", () => { if (open && open.sample) drawTokens(); });
$("prev-token").addEventListener("click", () => stepWorst(-1));
$("next-token").addEventListener("click", () => stepWorst(1));
$("prev-sample").addEventListener("click", () => stepSample(-1));
$("next-sample").addEventListener("click", () => stepSample(1));
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const act = {
    n: () => (open ? stepWorst(1) : stepSample(1)), p: () => stepWorst(-1), j: () => stepSample(1), k: () => stepSample(-1),
    ArrowRight: () => open && selectToken((open.token ?? -1) + 1), ArrowLeft: () => open && selectToken((open.token ?? 1) - 1),
  }[event.key];
  if (act && (open || "njk".includes(event.key))) { event.preventDefault(); act(); }
});

async function restore(wanted) {
  if (wanted.colour && [...$("colour").options].some((option) => option.value === wanted.colour)) $("colour").value = wanted.colour;
  const rollout = wanted.rollout !== null && wanted.rollout < report.rollouts.length ? wanted.rollout : report.start;
  if (rollout !== view.rollout || !view.rows.length) await showRollout(rollout);
  if (wanted.sample !== null) await openPosition(wanted.sample, wanted.token);
}

(async () => {
  let stored = null;
  try { stored = localStorage.getItem("slime-instrument-theme"); } catch { /* as above */ }
  applyTheme(["light", "dark"].includes(stored) ? stored : "system");
  $("rollout").replaceChildren(...report.rollouts.map((one, i) => element("option", { value: i }, one.name + (one.findings.length ? " ▲" : ""))));
  $("picker").hidden = $("trend-box").hidden = report.rollouts.length < 2;
  $("sweep-box").hidden = !report.sweep;
  if (report.sweep) drawSweep(report.sweep);
  const shown = [...(report.words ? [["text", "text"]] : []), ["id", report.words ? "id" : "token ids"], ["value", "δ"]];
  $("show").replaceChildren(...shown.map(([value, text]) => element("option", { value }, text)));
  const wanted = readHash();
  view.rollout = -1;
  await restore(wanted);
  if (report.words) { words = await unpackedJson("words"); if (open && open.sample) drawTokens(); }
  document.documentElement.dataset.ready = "1";
})();
